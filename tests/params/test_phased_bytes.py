"""The bytes of gathers by dtype and phase, where a tensor subclass decides what is gathered."""

from typing import Any

import torch

from bed import ranks
from fsdp_wrap import record_events
from fsdp_wrap.tools import plan
from params.phased import BLOCKS, HIDDEN, WIDTH, Mixed, installed, plain, sharded


@ranks(2)
def test_events_tell_the_bytes_by_dtype_and_phase(rank, world_size):
    with installed(), record_events() as events:
        model = sharded(plain(Mixed))
        model(torch.randn(2, WIDTH, dtype=torch.float64)).sum().backward()
    told = {event.phase.value: event for event in events if event.unit == "blocks.0" and event.by_dtype}
    values, biases = 2 * WIDTH * HIDDEN, 8 * (WIDTH + HIDDEN)
    assert told["forward"].by_dtype == {
        "uint8": values // 2,
        "float32": 4 * values // 16,
        "float64": biases + 2 * 8 * world_size,
    }
    assert told["backward"].by_dtype == {
        "uint8": values // 2,
        "float8_e4m3fn": values // 16,
        "float64": biases,
    }
    for event in events:
        if event.kind.value == "unshard":
            assert sum(event.by_dtype.values()) == event.nbytes > 0
        elif event.kind.value == "reshard" and event.unit == "blocks.0":
            assert event.nbytes == told[event.phase.value].nbytes


def test_plans_tell_the_bytes_by_dtype_and_phase():
    def setup() -> Any:
        model = sharded(plain(Mixed))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step() -> None:
            model(torch.randn(2, WIDTH, dtype=torch.float64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    with installed():
        planned = plan(setup, ranks=2)
    values, biases, head = 2 * WIDTH * HIDDEN, 8 * (WIDTH + HIDDEN), 8 * 8 * (WIDTH + 1)
    assert planned.gathered_bytes == {
        "forward": {
            "float64": BLOCKS * (biases + 2 * 8 * 2) + head,
            "uint8": BLOCKS * values // 2,
            "float32": BLOCKS * values // 4,
        },
        "backward": {
            "float64": BLOCKS * biases,
            "uint8": BLOCKS * values // 2,
            "float8_e4m3fn": BLOCKS * values // 16,
        },
    }
    assert type(planned).from_json(planned.to_json()) == planned
    assert "gathered in backward: " in str(planned) and "float8_e4m3fn" in str(planned)
    assert all(len(line) <= 80 for line in str(planned).splitlines())
