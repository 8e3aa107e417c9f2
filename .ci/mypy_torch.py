"""A plugin of mypy: where torch's declarations say less than a program knows, a value may be anything.

To torch a module keeps a `Tensor | Module` under a name; a gradient and the group of all ranks may be `None`.
Each use would have to say again which it is, and a program in which it is another one fails there by itself.
"""

from collections.abc import Callable

from mypy.nodes import FuncDef
from mypy.plugin import AttributeContext, ClassDefContext, Plugin
from mypy.types import AnyType, CallableType, Type, TypeOfAny

ATTRIBUTES = {"torch._C.TensorBase.grad", "torch.distributed.distributed_c10d._WorldMeta.WORLD"}


def _be_anything(context: AttributeContext) -> Type:
    return AnyType(TypeOfAny.explicit)


def _keep_anything(context: ClassDefContext) -> None:
    """Lets `__getattr__` return, and `__setattr__` take, what is not a `Tensor | Module`."""
    anything = AnyType(TypeOfAny.explicit)
    for method in context.cls.defs.body:
        if isinstance(method, FuncDef) and isinstance(declared := method.unanalyzed_type, CallableType):
            if method.name == "__getattr__":
                method.type = method.unanalyzed_type = declared.copy_modified(ret_type=anything)
            elif method.name == "__setattr__":
                types = [*declared.arg_types[:-1], anything]
                method.type = method.unanalyzed_type = declared.copy_modified(arg_types=types)


class TorchPlugin(Plugin):
    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        return _be_anything if fullname in ATTRIBUTES else None

    def get_customize_class_mro_hook(self, fullname: str) -> Callable[[ClassDefContext], None] | None:
        return _keep_anything if fullname == "torch.nn.modules.module.Module" else None


def plugin(version: str) -> type[Plugin]:
    return TorchPlugin
