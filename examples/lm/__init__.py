"""The parts of the language-model example: model, data, checkpoints, launch."""
