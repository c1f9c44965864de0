"""Packaging of megasdc. Tested versions are pinned in launch/constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="megasdc",
    version="0.1.0",
    description="Pretrain Megatron-core GPT models under DeepSpeed ZeRO-1, right and on time on imperfect hardware",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    packages=find_packages(include=["megasdc", "megasdc.*"]),
    package_data={
        "megasdc.config": ["profiles/*.json"],
        "megasdc.lab.sweeps": ["papers/*.json"],
        "megasdc.output": ["templates/*.html"],
        "megasdc.tensors": ["*.c"],
    },
    python_requires=">=3.11,<3.14",
    install_requires=[
        "torch>=2.10.0a0,<2.14",
        "deepspeed>=0.19,<0.20",
        "megatron-core>=0.16,<0.20",
        "pydantic>=2",
        "typer",
        "rich",
        "numpy",
        "datasets",
        "transformers",
        "sentencepiece",
        "safetensors",
        "tokenizers",
        "huggingface_hub",
        "protobuf",
        "tensorboard",
        "prometheus_client",
        "plotly",
        "jinja2",
        "pyarrow",
        "xxhash",
        "psutil",
        "nvidia-ml-py>=13",
        "zstandard",
        "fsspec>=2024.2",
    ],
    extras_require={
        "docs": ["mkdocs-material"],
        "wandb": ["wandb"],
        "s3": ["s3fs>=2024.2"],
        "gcs": ["gcsfs>=2024.2"],
        "azure": ["adlfs>=2024.2"],
        "test": [
            *("mkdocs-material", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "mypy", "ruff", "wandb"),
            *("s3fs>=2024.2", "gcsfs>=2024.2", "adlfs>=2024.2"),
            *("moto[s3]", "flask", "flask-cors", "gcp-storage-emulator", "accelerate"),
        ],
    },
    entry_points={"console_scripts": ["megasdc = megasdc.__main__:main"]},
)
