"""Puts `fsdp_wrap.compat` in front of programs that start their ranks themselves, as a user would.

Python imports a file of this name at its start, if its folder is on `PYTHONPATH`. `IN_FRONT` says what ranks
run on: "ours", or "torchs", where accelerate only accepts a host without accelerators. What clients ask of a
GPU besides is answered for both.
"""

import os
from typing import Any

if "RANK" in os.environ and "IN_FRONT" in os.environ:
    import torch
    from torch import distributed as dist

    from fsdp_wrap import compat
    from fsdp_wrap.compat.clients import _open_accelerate

    def _know_no_memory(installation: Any, memory: Any) -> None:
        """Lets torchtune's recipes log the memory of a device, which they do where they are told not to."""
        memory.get_memory_stats = lambda device, reset_stats=True: {}
        memory.log_memory_stats = lambda stats, message="": None
        memory.cleanup_before_training = lambda: None

    def _begin(
        backend: str | None = None, *given: Any, begin: Any = dist.init_process_group, **named: Any
    ) -> None:
        """Begins by gloo where a client asks for NCCL, whatever its device is."""
        begin("cpu:gloo" if backend == "cuda:nccl,cpu:gloo" else backend, *given, **named)

    def _mesh_of_the_cpu(installation: Any, parallelism: Any) -> None:
        """Lets axolotl make a mesh: it names a GPU's."""
        build = parallelism.ParallelismConfig.build_device_mesh
        parallelism.ParallelismConfig.build_device_mesh = lambda config, device_type: build(config, "cpu")

    def _note_torchs() -> None:
        """Torch's own FSDP leaves a file when it begins, which shows what a program runs on."""
        from torch.distributed.fsdp._flat_param import FlatParamHandle
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

        runtimes: tuple[Any, ...] = (FlatParamHandle, FSDPParamGroup)
        for runtime in runtimes:

            def begin(self: Any, *given: Any, _init: Any = runtime.__init__, **named: Any) -> None:
                open(os.environ["TORCHS_BEGAN"], "w").close()
                _init(self, *given, **named)

            runtime.__init__ = begin

    if "TORCHS_BEGAN" in os.environ:
        _note_torchs()
    torch.manual_seed(0)  # axolotl draws adapters before it seeds
    dist.init_process_group = _begin
    compat.Installation().when_imported("accelerate.parallelism_config", _mesh_of_the_cpu)
    compat.Installation().when_imported("torchtune.training.memory", _know_no_memory)
    if os.environ["IN_FRONT"] == "ours":
        compat.install(cpu=True, fully_shard=True)
    else:
        compat.Installation().when_imported("accelerate.state", _open_accelerate)
