"""LoRA (Hu et al., 2021): train small matrices added to frozen linear maps instead of the weights. Uses peft.

    W x + (alpha / r) · B A x        W [out, in] is frozen; A [r, in] begins at random, B [out, r] at 0

peft adds the matrices to a model in place, so the model keeps its class, and all callers work as before. The output is
an ordinary checkpoint, in which W + (alpha / r) · B A replaces W, and the adapter, in a subdirectory in the format of
peft. docs/adapters.md has the rules.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from bertdata import key
from bertdata.support import DatasetError, UsageError, install
from bertrain.config import Config
from bertrain.lab.fingerprint import fingerprint
from bertrain.lab.options import AdapterOptions, Lora, parse_lora
from bertrain.methods import Method, Tensors
from bertrain.models.families import add_names_of_4, family_of, layers_of
from bertrain.objectives import Learner

ADAPTER, WEIGHTS, CONFIG = "adapter", "adapter_model.safetensors", "adapter_config.json"
_NAME = "default"  # peft's name for a model's first adapter
_PREFIX = "base_model.model."  # prefix of each tensor name in peft's files
_TASK_TYPES = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}
"""End of a class name → peft's name of the task, which its AutoPeftModel classes need."""
_OF_A_DECODER = """\
The base of this adapter is {base}, a decoder. The adapter was trained with attention to both sides, but peft loads a
base without `"is_causal": false` in its config.json with attention to the left only. Load the configuration of the
base, set `config.is_causal = False`, and give
`{kind}.from_pretrained(base, config=config)` to `PeftModel.from_pretrained`; or use the merged weights in the directory
above.
"""


class Adapters(Method):
    """Trains an adapter on the frozen weights of --init."""

    options_type = AdapterOptions
    frozen_by = "lora"

    def identity(self, learner: Learner) -> Mapping[str, str]:
        trained = {name for name, weight in learner.model.named_parameters() if weight.requires_grad}
        base = f"weights of SHA-256 {fingerprint(learner.model, without=trained)[:16]} below the adapter"
        return {"lora": self.options.lora, "init": base}

    def base_model(self, config: Config, resume: Path | None) -> str | None:
        """Return the path of the frozen weights. Raises DatasetError for a damaged adapter."""
        path = (resume or Path()) / ADAPTER / CONFIG
        if not resume or not path.exists():
            return config.init if resume else None
        try:
            known = json.loads(path.read_bytes())["base_model_name_or_path"]
            return known if Path(known).is_dir() else config.init
        except (ValueError, KeyError, TypeError, RecursionError):
            raise _damaged(path) from None

    def change_model(self, model: PreTrainedModel, config: Config, resume: Path | None) -> None:
        add(model, parse_lora(self.options.lora), seed=config.seed)
        if resume and (resume / ADAPTER).is_dir():  # otherwise the run reports the missing --lora
            read(model, resume)

    def facts(self, learner: Learner) -> Mapping[str, Any]:
        parameters = [*learner.model.parameters()]
        trained = sum(each.numel() for each in parameters if each.requires_grad)
        return {"trained parameters": trained, "frozen parameters": sum(map(torch.numel, parameters)) - trained}

    def export(self, model: PreTrainedModel, weights: Tensors, beside: Tensors, directory: Path) -> Tensors:
        write(model, weights, directory)
        return plain(model, weights)


def _needed(package: str, advice: str) -> Any:
    """Import a package that --lora needs."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise UsageError(f"--lora needs {package}; {advice}", "not-installed", option="lora") from None


def add(model: PreTrainedModel, lora: Lora, *, seed: int, in_full: Sequence[str] = ()) -> None:
    """Freeze a model and add matrices to its linear maps, in place. They are the same on every rank.

    in_full: names of modules to train in full, such as a new head. Raises UsageError if peft or bitsandbytes is
    missing, or if no linear map matches.
    """
    peft = _needed("peft", install("lora"))
    names = _targets(model, lora.target, in_full)
    if lora.four_bits:
        _quantize(model, names)
    options: dict[str, Any] = {"target_modules": names, "modules_to_save": list(in_full) or None}
    config = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, **options, base_model_name_or_path=model.name_or_path)
    torch.manual_seed(key(seed, "lora") >> 1)
    peft.inject_adapter_in_model(config, model)
    config.target_modules = sorted(config.target_modules)  # peft stores a set, whose order is random
    kind = type(model)
    config.task_type = next((task for head, task in _TASK_TYPES.items() if head in kind.__name__), None)
    if not config.task_type:  # peft has no name for masked LMs; its AutoPeftModel then loads this class
        config.auto_mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}


def _targets(model: PreTrainedModel, pattern: str, in_full: Sequence[str]) -> list[str]:
    """Return the names of the linear maps that get matrices."""
    maps = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not name.startswith(tuple(in_full))
    }
    inside = {part for layer in layers_of(model) for part in layer.modules()}
    targets = [name for name, each in maps.items() if (re.search(pattern, name) if pattern else each in inside)]
    if not targets:
        some = f"{len(maps)} linear maps of the {model.config.model_type}, such as {next(iter(maps), '-')}"
        sentence = f"--lora: target={pattern} matches none of the {some}; give a different pattern"
        raise UsageError(sentence, "no-match", option="lora", given=pattern)
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    if tied := [name for name in targets if maps[name].weight in embeddings]:
        sentence = f"--lora: target={pattern} matches {tied[0]}, which shares the embeddings; give a different pattern"
        raise UsageError(sentence, "conflict", option="lora", given=pattern)
    return targets


def heads_of(model: PreTrainedModel) -> list[str]:
    """Return the names of a model's task head and pooler: the modules that pre-training did not train."""
    encoder = model.base_model
    parts = {name: part for name, part in model.named_children() if part is not encoder}
    parts |= {f"{model.base_model_prefix}.{name}": part for name, part in encoder.named_children() if name == "pooler"}
    return [name for name, part in parts.items() if any(True for _ in part.parameters())]


def plain(model: PreTrainedModel, state: Tensors) -> dict[str, torch.Tensor]:
    """Turn the state dict of a model with an adapter into that of an ordinary model: W + (alpha / r) · B A replaces W.

    Costs r operations for each element of W. If W is stored in 4 bits, its dequantized value is used.
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    merged = dict(state)
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, LoraLayer | ModulesToSaveWrapper):
            continue
        inside = [other for other in merged if other.startswith(f"{name}.")]
        own = {other.removeprefix(f"{name}."): merged.pop(other) for other in inside}
        if isinstance(module, ModulesToSaveWrapper):
            first = f"modules_to_save.{_NAME}."
            parts = {part.removeprefix(first): value for part, value in own.items() if part.startswith(first)}
        else:
            a, b = (own[f"lora_{side}.{_NAME}.weight"] for side in "AB")
            parts = {part: own[f"base_layer.{part}"] for part in ("weight", "bias") if f"base_layer.{part}" in own}
            frozen = _dequantized(module.get_base_layer(), parts["weight"]).to(b.device)
            parts["weight"] = torch.addmm(frozen, b, a, alpha=module.scaling[_NAME])
        merged |= {f"{name}.{part}": value for part, value in parts.items()}
    return merged


def save(model: PreTrainedModel, state: Tensors, directory: Path) -> None:
    """Write a model with the weights of a state dict. An adapter is merged, and also written to a subdirectory.

    AutoModel loads directory, and peft's PeftModel loads directory/adapter on the frozen weights.
    """
    add_names_of_4(model.config)
    if is_adapted := hasattr(model, "peft_config"):
        write(model, state, directory)
    model.save_pretrained(directory, state_dict=plain(model, state) if is_adapted else dict(state))


def write(model: PreTrainedModel, state: Tensors, directory: Path) -> None:
    """Write the adapter of a model, with the weights of a state dict, to directory/adapter."""
    from peft import get_peft_model_state_dict

    own = get_peft_model_state_dict(model, dict(state), save_embedding_layers=False)
    (directory / ADAPTER).mkdir(exist_ok=True)
    weights = {_PREFIX + name: tensor.contiguous() for name, tensor in own.items()}
    save_file(weights, directory / ADAPTER / WEIGHTS, {"format": "pt"})
    model.peft_config[_NAME].save_pretrained(directory / ADAPTER)
    if family_of(model).decoder and not getattr(model.config, "is_causal", True):
        about = _OF_A_DECODER.format(base=model.name_or_path, kind=type(model).__name__)
        (directory / ADAPTER / "README.md").write_text(about, encoding="utf-8")


def read(model: PreTrainedModel, directory: Path) -> None:
    """Load the weights that `write` wrote into the adapter that `add` added to a model.

    Raises DatasetError if they cannot be read, or if their sizes differ.
    """
    from peft import set_peft_model_state_dict

    path = directory / ADAPTER / WEIGHTS
    try:
        weights = {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(path).items()}
        set_peft_model_state_dict(model, weights)
    except (SafetensorError, RuntimeError):
        raise _damaged(path) from None


def _damaged(path: Path) -> DatasetError:
    sentence = f"{path} is damaged, or was not trained on these weights; give a different --out"
    return DatasetError(sentence, "damaged", given=str(path))


# ------------------------------------------------------------------------------------------------------------ 4 bits


def _quantize(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Convert the weights of linear maps to 4-bit NormalFloats (QLoRA, Dettmers et al., 2023)."""
    layers = _needed("bitsandbytes", "pip install bitsandbytes, or leave bits=4 out").nn
    for name in names:
        parent, _, last = name.rpartition(".")
        old: Any = model.get_submodule(name)
        shape = old.in_features, old.out_features, old.bias is not None
        new = layers.Linear4bit(*shape, quant_type="nf4", device="meta")
        weight = layers.Params4bit(old.weight.detach().clone(), requires_grad=False, quant_type="nf4", module=new)
        new.weight, new.bias = weight.to("cpu"), old.bias  # `to` quantizes
        new.support_avx512bf16_for_cpu = False  # else an evaluation packs the weights, and gradients are lost
        setattr(model.get_submodule(parent), last, new)
    model.is_loaded_in_4bit = True  # type: ignore[assignment]  # for peft; torch types all attributes as modules


def _dequantized(module: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    """Return the weight of a linear map from its stored form `weight`."""
    stored: Any = module.weight
    if type(stored).__name__ != "Params4bit":
        return weight
    return importlib.import_module("bitsandbytes").functional.dequantize_4bit(stored.data, stored.quant_state)
