"""The test bed: tests whose bodies run in real rank processes over gloo.

Words: a *job* is one function call made in every rank, an *outcome* is what one rank reports of it, a *crew*
is a set of rank processes, and the *pool* is the crew that tests share.
"""

from bed.crew import warm_up
from bed.decorator import ranks
from bed.job import Outcome
from bed.pool import run_isolated, run_ranks, shutdown
from bed.report import RankFailure

__all__ = ["Outcome", "RankFailure", "ranks", "run_isolated", "run_ranks", "shutdown", "warm_up"]
