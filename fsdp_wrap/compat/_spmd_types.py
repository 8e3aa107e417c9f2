"""Parameters with types of `spmd_types`: stored as `DTensor`s, and plain where modules compute with them.

Such types say, for each dimension of a mesh, how ranks hold a plain tensor and what its gradients are. See
https://github.com/meta-pytorch/spmd_types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import spmd_types as spmd
import torch
from spmd_types.types import partition_spec_to_shard_types
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from fsdp_wrap._params import DataMesh, LocalPart, typed_part
from fsdp_wrap._runtime import Step


@dataclass(frozen=True, kw_only=True)
class AnnotatedPart(LocalPart):
    """The local part of a parameter that is stored as a `DTensor`, and plain where modules compute with it.

    A type of each dimension of the mesh says how ranks hold the parameter and what their gradients are: `R`
    is a copy, whose gradients are summands; `I` a copy, whose gradients are equal; `S(dim)` a part. Over
    dimensions of data parallelism it is `R`, also where it is not said.

    Attributes:
        gradients: The part, placed as the gradient of one rank is.
        types: The types that a leaf carries, by axis.
        partition: How several axes cut one dimension, if they do.
    """

    gradients: LocalPart
    types: Mapping[Any, Any]
    partition: Any

    @classmethod
    def of_annotated(cls, fqn: str, param: torch.Tensor, data: DataMesh) -> AnnotatedPart | None:
        """Reads the types of a parameter; None if there are none, and no dimensions that want some.

        Raises:
            ValueError: If they do not say how the parameter is placed on the whole mesh, or if it is not `R`
                over dimensions of data parallelism.
        """
        local, mesh = spmd.get_local_type(param), data.whole
        if mesh is None and not local:
            return None
        if mesh is None:
            raise ValueError(
                f"parameter '{fqn}' has types of spmd_types: pass fully_shard the whole mesh and "
                "dp_mesh_dims=DataParallelMeshDims(shard=..., replicate=...) with its dimensions of data "
                "parallelism"
            )
        partition = spmd.get_partition_spec(param)
        types = dict(local)
        types.update({} if partition is None else partition_spec_to_shard_types(partition))
        kinds = _kinds(fqn, types, mesh, data.own_dims)
        try:
            placements = [spmd.spmd_type_to_dtensor_placement(kind) for kind in kinds]
            of_gradients = [spmd.spmd_type_to_dtensor_placement(kind.backward_type()) for kind in kinds]
        except ValueError as error:
            raise ValueError(
                f"parameter '{fqn}' has the types {types}, which say no placement: {error}"
            ) from error
        whole = LocalPart.of(
            DTensor.from_local(param.detach(), mesh, placements, run_check=False), data.own_dims
        )
        assert whole is not None
        gradients = replace(whole, placements=tuple(of_gradients))
        carried = _completed(local, mesh)
        return cls(**vars(whole), gradients=gradients, types=carried, partition=partition)

    def parameter(self, local: torch.Tensor) -> nn.Parameter:
        param = nn.Parameter(local, requires_grad=False)
        self.shown(param)
        return param

    def shown(self, local: torch.Tensor) -> torch.Tensor:
        spmd.assert_type(local, self.types, partition_spec=self.partition)
        return local

    def attributes(self, param: torch.Tensor) -> dict[str, Any]:
        # The names of its types are private: their values are told apart.
        types = spmd.get_local_type(param), spmd.get_partition_spec(param)
        return {
            name: value
            for name, value in vars(param).items()
            if value is None or not any(value is kind for kind in types)
        }

    def arriving(self, grad: torch.Tensor) -> torch.Tensor:
        return grad if isinstance(grad, DTensor) else self.gradients.tensor(grad)

    def shown_gradient(self, local: torch.Tensor) -> torch.Tensor:
        """Returns a gradient that ranks will sum: whole on the first of them, and zero on the others."""
        placements, here = self.gradients.placements, self.mesh.get_coordinate() or ()
        summed = [dim for dim, placement in enumerate(placements) if isinstance(placement, Partial)]
        first = not any(here[dim] for dim in summed if dim not in self.own)
        return local if first else torch.zeros_like(local)


def _kinds(fqn: str, types: Mapping[Any, Any], mesh: DeviceMesh, own: tuple[str, ...]) -> list[Any]:
    """Returns the type over each dimension of the mesh."""
    axes = _axes(mesh)
    others = {name: axis for name, axis in axes.items() if name not in own and axis.size() > 1}
    for axis, kind in types.items():
        if axis not in others.values() and (kind is not spmd.R or not axis.isorthogonal(*others.values())):
            raise ValueError(
                f"parameter '{fqn}' has the type {kind} on {axis}; over the dimensions {own} of {mesh}, "
                "which fully_shard reduces over, it must be R, and other types must be of the other "
                f"dimensions {[*others]}"
            )
    lacking = [name for name, axis in others.items() if axis not in types]
    if lacking:
        raise ValueError(
            f"parameter '{fqn}' has types of spmd_types on {[*types]}, and none on {lacking} of {mesh}: "
            "spmd_types.assert_type takes one for each dimension that is not of data parallelism"
        )
    return [types[others[name]] if name in others else spmd.R if name in own else spmd.I for name in axes]


def _completed(local: Mapping[Any, Any], mesh: DeviceMesh) -> dict[Any, Any]:
    """Adds `R` on axes without a type: of the mesh that types are checked on, or else of the whole mesh."""
    completed = dict(local)
    for axis in spmd.current_mesh() or _axes(mesh).values():
        if axis.size() > 1 and axis.isorthogonal(*completed):
            completed[axis] = spmd.R
    return completed


def _axes(mesh: DeviceMesh) -> dict[str, Any]:
    return {name: spmd.MeshAxis.of(mesh.get_group(name)) for name in mesh.mesh_dim_names or ()}


_COMPUTING = (
    Step.before_forward,
    Step.after_forward,
    Step.end_outermost,
    Step._before_backward,
    Step.input_gradient_arrived,
    Step._end_backward_of,
    Step._end_backward,
)
"""The verbs of the runtime that compute with tensors: buffers have no types, and hooks compute nothing."""

for _verb in _COMPUTING:
    spmd.register_no_typecheck(_verb)  # and what it calls; it needs no wrapper
typed_part.fill(AnnotatedPart.of_annotated)
