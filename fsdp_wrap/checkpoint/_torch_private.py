"""Private names of `torch.distributed.checkpoint`, which `_core/torch_private.py` lists with their purposes.

They are apart because their import takes as long as that of the rest of the package.
"""

from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.filesystem import _StoragePrefix as StoragePrefix
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms as StorageWriterTransforms
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict as load_state_dict
from torch.distributed.checkpoint.utils import _DistWrapper as DistWrapper
