"""Is everything known to make runs differ named, and nothing else?"""

import sys

import pytest

from megasdc.config.load import parse_config
from megasdc.config.repeatability import find_causes, find_startup_modules

FIXED = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}
HUB = {"kind": "hub", "path": "allenai/c4"}
COMMIT = "1588ec454efa1a09f29cd18ddd04fe05fc8653a2"


def causes(environ=None, *, cuda=False, deepspeed=None, modules=None, **sections):
    """(place, between) of what is found."""
    base = {"data": {"path": "x"}, "protect": "off", "training": {"steps": 10}, "logging": {"run_dir": "r"}}
    raw = {**(deepspeed or {}), "megasdc": base}
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    found = find_causes(parse_config(raw), environ or {}, modules or {}, cuda)
    assert all(cause.remedy and cause.place in cause.render() for cause in found)
    return [(cause.place, cause.between) for cause in found]


ON = {"determinism": {"enabled": True}}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"cuda": True, **ON},
        {"cuda": True, **ON, "environ": FIXED},
        {"deepspeed": {"zero_optimization": {"overlap_comm": True, "round_robin_gradients": True}}},
        {"cuda": True, **ON, "deepspeed": {"fp16": {"enabled": True, "loss_scale": 0}}},
        {"environ": {"OMP_NUM_THREADS": "3", "OMP_DYNAMIC": "true", "NCCL_ALGO": "Tree", "THP_MEM_ALLOC_ENABLE": "1"}},
        {"data": {"sources": [{**HUB, "revision": COMMIT}]}},
        {"model": {"hidden_dropout": 0.1}, "parallel": {"threads": 4}},
    ],
)
def test_clean_configurations(given):
    """What repeats is not complained of, also beside settings that sound dangerous."""
    assert causes(**given) == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"parallel": {"threads": 0}}, [("megasdc.parallel.threads", "machines")]),
        ({"parallel": {"threads": 2}, "environ": {"OMP_DYNAMIC": "TRUE"}}, [("OMP_DYNAMIC", "runs")]),
        ({"environ": {"MKL_CBWR": "COMPATIBLE"}}, [("MKL_CBWR", "machines")]),
        ({"environ": {"ONEDNN_MAX_CPU_ISA": "AVX2"}}, [("ONEDNN_MAX_CPU_ISA", "machines")]),
        ({"data": {"sources": [HUB]}}, [("megasdc.data.sources.0.revision", "machines")]),
        ({"data": {"sources": [{**HUB, "revision": "main"}]}}, [("megasdc.data.sources.0.revision", "machines")]),
        (
            {"data": {"tokenizer": {"kind": "huggingface", "path": "no/such-folder"}}},
            [("megasdc.data.tokenizer.path", "machines")],
        ),
        (
            {"deepspeed": {"optimizer": {"params": {"torch_adam": False}}}},
            [("optimizer.params.torch_adam", "machines")],
        ),
        ({"modules": {"sitecustomize": "/x/sitecustomize.py"}}, [("module sitecustomize", "runs")]),
        (
            {"cuda": True},
            [
                ("megasdc.determinism.enabled", "runs"),
                ("CUBLAS_WORKSPACE_CONFIG", "runs"),
                ("NCCL_ALGO", "runs"),
                ("NCCL_PROTO", "runs"),
            ],
        ),
        (
            {
                "cuda": True,
                "deepspeed": {"bf16": {"enabled": True}},
                "environ": {**FIXED, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"},
            },
            [
                ("megasdc.determinism.enabled", "runs"),
                ("torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction", "machines"),
                ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "machines"),
            ],
        ),
        ({"cuda": True, **ON, "environ": {**FIXED, "NCCL_ALGO": "NVLS"}}, [("NCCL_ALGO", "runs")]),
    ],
)
def test_causes_are_named(given, expected):
    """Each cause is named by setting, variable or module, with whom it separates; nothing else is."""
    assert causes(**given) == expected


def test_transformer_engine_is_named_where_it_is_used(monkeypatch):
    """Its variable counts only with its backend, and its overlapped sums do."""
    import megasdc.config.contradictions as model_rules

    monkeypatch.setattr(model_rules.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(model_rules, "megatron_problems", lambda model: {})
    model = {"backend": "transformer_engine", "megatron": {"tp_comm_overlap": True}}
    environ = {**FIXED, "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}
    assert causes(environ, cuda=True, model=model) == [
        ("megasdc.determinism.enabled", "runs"),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "runs"),
        ("megasdc.model.megatron.tp_comm_overlap", "runs"),
    ]


def test_startup_modules_are_found_on_the_path(monkeypatch, tmp_path):
    """A module that Python imports by itself is found where a user put it, and not where Python has its own."""
    file = tmp_path / "usercustomize.py"
    file.write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "usercustomize", raising=False)
    assert find_startup_modules().get("usercustomize") == str(file)
    file.unlink()
    assert "usercustomize" not in find_startup_modules()
