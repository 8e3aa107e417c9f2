"""From the ranks' outcomes to one text for a person."""

from collections.abc import Sequence

from bed.job import Outcome

# What comes first: the others lose their connections when a rank dies, and hang when one fails.
_BLAME = ["died", "failed", "hung", "skipped", "passed"]


class RankFailure(Exception):
    """A job did not pass on every rank; the message has every rank's traceback, stack or way of dying."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        super().__init__(_text(outcomes))
        self.outcomes = list(outcomes)


def _text(outcomes: Sequence[Outcome]) -> str:
    return "\n".join([_headline(outcomes), *_sections(outcomes)])


def _headline(outcomes: Sequence[Outcome]) -> str:
    rank, worst = _by_blame(outcomes)[0]
    return f"rank {rank} of {len(outcomes)} {worst.kind}: {worst.headline}"


def _by_blame(outcomes: Sequence[Outcome]) -> list[tuple[int, Outcome]]:
    return sorted(enumerate(outcomes), key=lambda pair: _BLAME.index(pair[1].kind))


def _sections(outcomes: Sequence[Outcome]) -> list[str]:
    """Returns a section for each rank; ranks with the same text share one."""
    sections: dict[tuple[str, str], list[str]] = {}
    for rank, outcome in _by_blame(outcomes):
        # A traceback ends with its headline.
        detail = f": {outcome.headline}" if outcome.headline and outcome.kind != "failed" else ""
        title = outcome.kind + detail
        sections.setdefault((title, _body(outcome)), []).append(str(rank))
    return [
        f"\n---- rank{'s' if len(members) > 1 else ''} {', '.join(members)} {title} ----\n{body}"
        for (title, body), members in sections.items()
    ]


def _body(outcome: Outcome) -> str:
    text = outcome.text.rstrip()
    if not outcome.output:
        return text
    return f"{text}\n-- its output --\n{outcome.output.rstrip()}".lstrip()
