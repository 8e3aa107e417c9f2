"""What shows a training step before it runs and after."""

__all__: list[str] = []
