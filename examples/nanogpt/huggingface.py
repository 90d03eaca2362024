"""Models from disk and onto it: our runs' checkpoints, and Hugging Face's GPT-2 folders.

`python -m examples.nanogpt.huggingface export RUN FOLDER` makes the second of the first, for
transformers and lm-eval-harness.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import orbax.checkpoint as ocp
import tyro

from examples.nanogpt import data, model, tokenizer

CONFIG, WEIGHTS = "config.json", "model.safetensors"
PREFIX = "transformer."  # of names in a model with its head, as transformers saves it
# Their names of a block's parts, and ours. Their "Conv1D" is [in, out], as Flax's kernels are.
PARTS = {
    "ln_1": "attention_norm",
    "attn.c_attn": "attention_in",
    "attn.c_proj": "attention_out",
    "ln_2": "mlp_norm",
    "mlp.c_fc": "mlp_in",
    "mlp.c_proj": "mlp_out",
}
# What our network does and a folder's config.json must not contradict.
FIXED = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
    "add_cross_attention": False,
}
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def load(folder: Path) -> tuple[model.GPTConfig, model.Params]:
    """The model of a run of ours (its newest checkpoint) or of a Hugging Face GPT-2 folder."""
    if (folder / "checkpoints").is_dir():
        return read_run(folder)
    if (folder / CONFIG).is_file():
        return read(folder)
    raise ValueError(
        f"{folder} has neither `checkpoints` nor {CONFIG}: pass the folder of a run that kept "
        "checkpoints, or of a Hugging Face GPT-2."
    )


def read_run(directory: Path) -> tuple[model.GPTConfig, model.Params]:
    """The newest checkpoint's model, on one device; its optimizer state is not read."""
    options = ocp.CheckpointManagerOptions(create=False)
    with ocp.CheckpointManager((directory / "checkpoints").absolute(), options=options) as manager:
        step = manager.latest_step()
        if step is None:
            raise ValueError(f"{directory} holds no finished checkpoint: train for longer.")

        def restore(**items: Any) -> Any:
            return manager.restore(step, args=ocp.args.Composite(**items))

        settings = restore(settings=ocp.args.JsonRestore()).settings
        config = model.GPTConfig(**settings["model"])
        shapes, structure = jax.tree.flatten(model.define(config)[1])
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        # A checkpoint holds the leaves of (parameters, optimizer state) by their numbers.
        wanted = {
            f"{i:05}": jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)
            for i, leaf in enumerate(shapes)
        }
        restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
        saved = restore(
            training=ocp.args.PyTreeRestore(wanted, restore_args, partial_restore=True)
        ).training
    return config, jax.tree.unflatten(structure, [saved[name] for name in sorted(saved)])


def read(folder: Path) -> tuple[model.GPTConfig, model.Params]:
    """The model of a folder with config.json and model.safetensors."""
    config = read_config(folder)
    path = folder / WEIGHTS
    if not path.is_file():
        raise ValueError(f"{folder} has no {WEIGHTS}: other formats and split files are not read.")
    safetensors = _safetensors()
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            weights = {name.removeprefix(PREFIX): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} cannot be read ({error}): copy or download it again.") from error
    return config, from_weights(weights, config, str(path))


def read_config(folder: Path) -> model.GPTConfig:
    """The model's configuration alone."""
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} has no {CONFIG}: pass the folder of a Hugging Face GPT-2.")
    return from_config(json.loads(path.read_text()), str(path))


def write(folder: Path, config: model.GPTConfig, params: model.Params) -> None:
    """Writes config.json and model.safetensors into a new folder, complete or not at all."""
    safetensors = _safetensors()
    weights = {PREFIX + name: leaf for name, leaf in to_weights(params, config).items()}
    with data.new_folder(folder) as partial:
        (partial / CONFIG).write_text(json.dumps(to_config(config), indent=2) + "\n")
        safetensors.numpy.save_file(weights, partial / WEIGHTS, metadata={"format": "pt"})


def to_config(config: model.GPTConfig) -> dict[str, Any]:
    """config.json of a model of ours. `bias` is nanoGPT's word, which transformers ignores."""
    end = tokenizer.end_of_text(config.vocab_size)
    return {
        "architectures": ["GPT2LMHeadModel"],
        **FIXED,
        "vocab_size": config.vocab_size,
        "n_positions": config.context,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": None,
        "scale_attn_by_inverse_layer_idx": config.scale_by_layer,
        **dict.fromkeys(DROPOUTS, config.dropout),
        "initializer_range": model.INIT_STD,
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": "float32",
        "bias": config.bias,
    }


def from_config(values: dict[str, Any], name: str = CONFIG) -> model.GPTConfig:
    """Our configuration of a GPT-2's config.json; defaults are transformers'."""
    for key in ("n_embd", "n_layer", "n_head", "n_positions", "vocab_size"):
        if key not in values:
            raise ValueError(f"{name} lacks {key}: it does not describe a GPT-2.")
    width = values["n_embd"]
    for key, expected in {**FIXED, "n_inner": 4 * width}.items():
        found = values.get(key, expected)
        if found != expected and not (key == "n_inner" and found is None):
            raise ValueError(f"{name}: {key} is {found}, but this GPT-2 knows only {expected}.")
    rates = {values.get(key, 0.1) for key in DROPOUTS}
    if len(rates) > 1:
        raise ValueError(f"{name}: {', '.join(DROPOUTS)} differ, but this GPT-2 has one rate.")
    return model.GPTConfig(
        layers=values["n_layer"],
        heads=values["n_head"],
        width=width,
        context=values["n_positions"],
        vocab_size=values["vocab_size"],
        bias=values.get("bias", True),
        dropout=rates.pop(),
        scale_by_layer=values.get("scale_attn_by_inverse_layer_idx", False),
    )


def names(config: model.GPTConfig) -> dict[str, tuple[tuple[str, ...], int | None]]:
    """Their name of every array -> our path to it, and which layer of it."""
    table: dict[str, tuple[tuple[str, ...], int | None]] = {
        "wte.weight": (("token_embedding", "embedding"), None),
        "wpe.weight": (("position_embedding", "embedding"), None),
        "ln_f.weight": (("final_norm", "scale"), None),
        "ln_f.bias": (("final_norm", "bias"), None),
    }
    for layer in range(config.layers):
        for theirs, ours in PARTS.items():
            weight = "scale" if ours.endswith("norm") else "kernel"
            table[f"h.{layer}.{theirs}.weight"] = ("blocks", ours, weight), layer
            table[f"h.{layer}.{theirs}.bias"] = ("blocks", ours, "bias"), layer
    return table


def to_weights(params: model.Params, config: model.GPTConfig) -> dict[str, np.ndarray]:
    """Their arrays of our parameters: no padding rows; biases we lack are zero."""
    params = jax.tree.map(np.asarray, params)
    weights = {}
    for name, (path, layer) in names(config).items():
        *above, leaf = path
        part = params
        for key in above:
            part = part[key]
        if leaf in part:
            array = part[leaf] if layer is None else part[leaf][layer]
        else:  # a bias is as long as the last axis of the weight beside it
            (weight,) = part.values()
            array = np.zeros(weight.shape[-1], weight.dtype)
        weights[name] = np.ascontiguousarray(array)
    weights["wte.weight"] = weights["wte.weight"][: config.vocab_size]
    return weights


def from_weights(
    weights: dict[str, np.ndarray], config: model.GPTConfig, name: str = WEIGHTS
) -> model.Params:
    """Our parameters, float32, of their arrays; rows of the padded vocabulary are zero."""
    # Old files hold the causal mask too, and the head, which is the embedding.
    buffers = (".attn.bias", ".attn.masked_bias", "lm_head.weight")
    weights = {key: leaf for key, leaf in weights.items() if not key.endswith(buffers)}
    table = names(config)
    if weights.keys() != table.keys():
        odd = sorted(weights.keys() ^ table.keys())
        raise ValueError(
            f"{name} lacks or should not hold {', '.join(odd[:3])} ({len(odd)} names)."
        )
    _, shapes = model.define(config)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    for key, (path, layer) in table.items():
        part = params
        for step in path[:-1]:
            part = part[step]
        if path[-1] not in part:  # a model without biases
            if np.any(weights[key]):
                raise ValueError(f"{name}: {key} is not zero, but {CONFIG} says bias is false.")
            continue
        place = part[path[-1]] if layer is None else part[path[-1]][layer]
        place = place[: config.vocab_size] if key == "wte.weight" else place
        if place.shape != weights[key].shape:
            raise ValueError(
                f"{name}: {key} has shape {weights[key].shape}, but {CONFIG} asks for "
                f"{place.shape}."
            )
        place[:] = weights[key]
    return jax.tree.map(jax.numpy.asarray, params)


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ValueError(
            "Hugging Face folders need safetensors: pip install safetensors"
        ) from error
    return safetensors


def command(
    action: Annotated[Literal["export"], tyro.conf.Positional, tyro.conf.arg(metavar="export")],
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")],
) -> None:
    """Writes the newest checkpoint of a run as a Hugging Face GPT-2 folder."""
    config, params = read_run(run)
    write(folder, config, params)
    print(f"{model.count(params):,} parameters of {run} are in {folder}")


def main() -> None:
    try:
        tyro.cli(command, prog="python -m examples.nanogpt.huggingface")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
