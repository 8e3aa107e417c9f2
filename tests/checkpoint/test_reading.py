"""Reading pieces: the same bits as by torch's reader, whoever wrote them and however they lie there."""

import gzip
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.utils.serialization import config

from fsdp_wrap.checkpoint._manifest import read_metadata
from fsdp_wrap.checkpoint._storage import KnownReader, _head_of, allocated, read
from fsdp_wrap.checkpoint._team import ALONE

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
]


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Returns a tensor of arbitrary bytes, NaNs among them."""
    values = torch.empty(shape, dtype=dtype)
    of_bytes = values.untyped_storage()
    content = torch.randint(0, 2 if dtype == torch.bool else 256, (of_bytes.nbytes(),), dtype=torch.uint8)
    return torch.empty(0, dtype=dtype).set_(content.untyped_storage()).view(shape)


def plain() -> dict[str, torch.Tensor]:
    tensors = {f"{dtype} {shape}": filled(dtype, *shape) for dtype in DTYPES for shape in [(), (3,), (5, 7)]}
    return tensors | {"large": filled(torch.float32, 300, 700), "begin": filled(torch.int16, 9, 5)[:4]}


def others() -> dict[str, torch.Tensor]:
    complex_ = filled(torch.complex64, 3, 4)
    return {
        "columns": filled(torch.float32, 5, 7).t(),
        "steps": filled(torch.bfloat16, 5, 8)[:, ::2],
        "one for all": filled(torch.float64, 1).expand(6),
        "conjugated": complex_.conj(),
        "negated": complex_.conj().imag,
        "parameter": torch.nn.Parameter(filled(torch.float32, 4)),
    }


def written(folder: Path, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Returns the state as torch's reader reads it."""
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, **options), no_dist=True)
    values = {
        name: torch.zeros_like(value, memory_format=torch.contiguous_format) for name, value in state.items()
    }
    dcp.load(values, checkpoint_id=folder, no_dist=True)
    return values


def read_back(folder: Path, into: Callable[[Any], Any] = allocated, extensions: Any = ()) -> dict[str, Any]:
    reader = KnownReader(folder, read_metadata(folder))
    flat = {name: into(entry) for name, entry in reader.metadata.state_dict_metadata.items()}
    for extension in extensions:
        reader.transforms.extension_registry.register(extension)
    return read(reader, flat, ALONE, lambda: flat)


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (value.dtype, value.shape), name
        torch.testing.assert_close(
            actual[name].detach().reshape(-1).view(torch.uint8),
            value.detach().reshape(-1).view(torch.uint8),
            msg=name,
            rtol=0,
            atol=0,
        )


@pytest.fixture
def unpickled(monkeypatch):
    """What torch.load was called for."""
    calls: list[Any] = []
    real = torch.load

    def load(file: Any, **how: Any) -> Any:
        calls.append(file)
        return real(file, **how)

    monkeypatch.setattr(torch, "load", load)
    return calls


@pytest.mark.parametrize("threads", [1, 3])
def test_plain_pieces_of_all_dtypes_go_straight_to_their_places(tmp_path, threads, unpickled):
    torch.manual_seed(0)
    expected = written(tmp_path, plain(), thread_count=threads)
    unpickled.clear()
    assert_same(read_back(tmp_path), expected)
    assert unpickled == []


def test_other_pieces_are_read_as_torch_reads_them(tmp_path):
    torch.manual_seed(0)
    state = plain() | others() | {"nothing": torch.empty(0, 3)}
    expected = written(tmp_path, state)
    assert_same(read_back(tmp_path), expected)


@pytest.mark.parametrize("into", [allocated, lambda entry: torch.zeros(entry.size, device="cpu").double()])
def test_a_default_device_changes_nothing(tmp_path, into):
    expected = written(tmp_path, {"a": torch.rand(7, 3)})
    _head_of.cache_clear()
    with torch.device("meta"):
        values = read_back(tmp_path, into)
    assert values["a"].tolist() == expected["a"].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_places_of_another_order_or_dtype_get_the_values(tmp_path, dtype):
    expected = written(tmp_path, {"a": torch.arange(35.0).view(5, 7), "b": torch.arange(6.0).view(2, 3)})
    values = read_back(tmp_path, lambda entry: torch.zeros(entry.size[::-1], dtype=dtype).t())
    assert {name: value.tolist() for name, value in values.items()} == {
        name: value.tolist() for name, value in expected.items()
    }


def saving_by(**how: Any) -> Any:
    return patch.object(torch, "save", partial(torch.save, **how))


FORMS = {
    "without zip": partial(saving_by, _use_new_zipfile_serialization=False),
    "aligned otherwise": partial(config.patch, {"save.storage_alignment": 256}),
}


@pytest.mark.parametrize("form", FORMS)
def test_pieces_in_other_forms_are_read_as_torch_reads_them(tmp_path, form, unpickled):
    with FORMS[form]():
        expected = written(tmp_path, {"a": filled(torch.float32, 5, 7), "b": filled(torch.bfloat16, 9)})
    unpickled.clear()
    assert_same(read_back(tmp_path), expected)
    assert len(unpickled) == len(expected)


class Zipped(StreamTransformExtension):
    """Compresses what is written."""

    @staticmethod
    def registry_name() -> str:
        return "tests.zipped"

    @staticmethod
    def from_descriptor(version: str) -> "Zipped":
        return Zipped()

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: Any) -> Any:
        return gzip.GzipFile(fileobj=output, mode="wb")

    def transform_from(self, input: Any) -> Any:
        return gzip.GzipFile(fileobj=input, mode="rb")


def test_pieces_that_an_extension_has_changed_are_left_to_it(tmp_path):
    state = plain()
    writer = dcp.FileSystemWriter(tmp_path, _extensions=[Zipped()])
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert_same(read_back(tmp_path, extensions=[Zipped]), state)


@pytest.mark.parametrize("left", [100, 700, 1000])
def test_a_file_that_is_cut_while_it_is_read_is_no_tensor(tmp_path, left):
    written(tmp_path, {"a": torch.ones(5000)})
    (data,) = tmp_path.glob("*.distcp")
    os.truncate(data, left)
    with pytest.raises(RuntimeError, match=f"reading {tmp_path} failed: "):
        read_back(tmp_path)


def test_a_piece_of_another_shape_than_the_metadata_say_is_refused(tmp_path):
    written(tmp_path, {"a": torch.ones(6, 1)})
    metadata = read_metadata(tmp_path)
    entry = metadata.state_dict_metadata["a"]
    (chunk,) = entry.chunks
    entry.size = chunk.sizes = torch.Size([6, 4])
    flat = {"a": torch.zeros(6, 4)}
    with pytest.raises(RuntimeError, match="'a' has no piece of shape"):
        read(KnownReader(tmp_path, metadata), flat, ALONE, lambda: None)
    assert flat["a"].tolist() == torch.zeros(6, 4).tolist()
