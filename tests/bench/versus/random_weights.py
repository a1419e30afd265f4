"""Models of a known shape with random weights, to measure speed at sizes whose real weights are not at hand.

    python -m tests.bench.versus.random_weights SHAPE FOLDER [--kind Q4_0] [--tokenizer MODEL.gguf]

Writes `FOLDER/SHAPE-KIND.gguf` and, with the same weights as bfloat16, the folder `FOLDER/SHAPE-bf16` in Hugging Face
form. What such a model says has no sense, but a step of it does the work of a step of the real one. Two things differ
from the real ones: RoPE is the plain kind, and the tokenizer is another model's, with the rest of the vocabulary filled
up by tokens that no text leads to. They have a text, so that an answer's tokens are seen when they are drawn.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter, LlamaFileType

from engine.errors import ModelError, ModelFileError
from engine.loading.checks import expected_shapes
from engine.loading.fetch import BUILTIN_MODELS, resolve_model
from engine.loading.gguf_reader import open_gguf
from engine.models.config import ModelConfig, RopeConfig
from tests.bench.versus.to_hugging_face import write_folder
from tests.tiny_models import add_shape, gguf_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from engine.loading.gguf_reader import MetadataReader

KINDS: Final = {
    GGMLQuantizationType.Q4_0: LlamaFileType.MOSTLY_Q4_0,
    GGMLQuantizationType.Q4_1: LlamaFileType.MOSTLY_Q4_1,
}
# Standard deviation of a weight whose codes are random, in units of its block's scale.
SPREAD: Final = {
    GGMLQuantizationType.Q4_0: 4.61,  # 0..15
    GGMLQuantizationType.Q4_1: 4.61,
    GGMLQuantizationType.Q8_0: 73.9,  # -128..127
    GGMLQuantizationType.Q6_K: 73.9 * 18.5,  # such a byte times -32..31
}
TOKENS, TOKEN_TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
NORMAL: Final = 1  # of tokenizer.ggml.token_type


def make_shape(
    layers: int, hidden: int, inner: int, heads: tuple[int, int, int], rows: int, **rest: int
) -> ModelConfig:
    """A shape whose head is its embedding.

    Args:
        heads: query heads, key/value heads, size of a head.
        rest: `context` and `theta`.
    """
    num_heads, num_kv_heads, head_size = heads
    return ModelConfig(
        architecture="llama",
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        vocab_size=rows,
        context_length=rest["context"],
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=float(rest["theta"])),
        tie_word_embeddings=True,
    )


# From the models' own config.json.
SHAPES: Final[Mapping[str, ModelConfig]] = {
    "tiny": make_shape(2, 64, 96, (4, 2, 16), 320, context=128, theta=10_000),
    "smollm2-135m": make_shape(30, 576, 1536, (9, 3, 64), 49_152, context=8192, theta=100_000),
    "llama-3.2-1b": make_shape(16, 2048, 8192, (32, 8, 64), 128_256, context=131_072, theta=500_000),
}


def write_gguf(path: Path, name: str, *, kind: GGMLQuantizationType, tokenizer: Path) -> None:
    """Write a GGUF file, one tensor at a time.

    Args:
        name: a key of `SHAPES`. Its vocabulary grows to the tokenizer's where that is larger.
        kind: of the matrices, but for the embedding, which gets what llama.cpp gives it: Q6_K, or Q8_0 where rows do
            not divide into blocks of 256.
        tokenizer: a GGUF file, of which the tokenizer and the chat template are taken.

    Raises:
        ModelError: `tokenizer` cannot be read.
        OSError: the file cannot be written.
    """
    reader = open_gguf(tokenizer)
    tokens = reader.strings(TOKENS)
    if not tokens:
        raise ModelFileError(f"{tokenizer} has no vocabulary; name another file with --tokenizer.")
    config = SHAPES[name]
    rows = max(config.vocab_size, len(tokens))
    writer = GGUFWriter(path, "llama")
    add_sizes(writer, name, config, kind)
    add_tokenizer(writer, reader, tokens, rows)
    shapes = {gguf_name(key): shape for key, shape in expected_shapes(config).items()}
    shapes["token_embd.weight"] = (rows, config.hidden_size)
    kinds = {key: None if len(shape) == 1 else kind for key, shape in shapes.items()}
    six_bits = config.hidden_size % GGML_QUANT_SIZES[GGMLQuantizationType.Q6_K][0] == 0
    kinds["token_embd.weight"] = GGMLQuantizationType.Q6_K if six_bits else GGMLQuantizationType.Q8_0
    for key, shape in shapes.items():
        add_info(writer, key, shape, kinds[key])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(0)
    for key, shape in shapes.items():
        block_kind = kinds[key]
        ones = np.ones(shape, np.float32)
        writer.write_tensor_data(ones if block_kind is None else random_blocks(block_kind, *shape, random))
    writer.close()


def add_sizes(writer: GGUFWriter, name: str, config: ModelConfig, kind: GGMLQuantizationType) -> None:
    """The metadata that tells name, shape and kind."""
    writer.add_name(f"{name} with random weights")
    add_shape(writer, config)
    writer.add_rope_dimension_count(config.head_size)
    writer.add_file_type(KINDS[kind])
    writer.add_quantization_version(2)


def add_tokenizer(writer: GGUFWriter, reader: MetadataReader, tokens: list[str], rows: int) -> None:
    """The other file's tokenizer and chat template, filled up to so many tokens."""
    fillers = [f"[PAD{token_id}]" for token_id in range(len(tokens), rows)]
    types = reader.integers(TOKEN_TYPES) or [NORMAL] * len(tokens)
    writer.add_token_list([*tokens, *fillers])
    writer.add_token_types([*types, *[NORMAL] * len(fillers)])
    for key, field in reader.fields.items():
        if key.startswith("tokenizer.") and key not in (TOKENS, TOKEN_TYPES):
            items = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(key, reader.value(key), field.types[0], items)


def add_info(writer: GGUFWriter, key: str, shape: tuple[int, ...], kind: GGMLQuantizationType | None) -> None:
    """What the file says of a tensor before the data of any comes; vectors, without a kind, are float32."""
    if kind is None:
        writer.add_tensor_info(key, shape, np.dtype(np.float32), 4 * shape[0])
        return
    size, num_bytes = GGML_QUANT_SIZES[kind]
    raw = (shape[0], shape[1] // size * num_bytes)
    writer.add_tensor_info(key, raw, np.dtype(np.uint8), raw[0] * raw[1], kind)


def random_blocks(kind: GGMLQuantizationType, rows: int, cols: int, random: np.random.Generator) -> NDArray[np.uint8]:
    """Blocks as they lie in a file, [rows, bytes of a row]: random codes, their mean about 0.

    Standard deviations are about `cols ** -0.5`, with which a product of unit values has unit values, so nothing grows
    out of bounds from layer to layer, and no draw is certain.
    """
    size, num_bytes = GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (rows, cols // size, num_bytes), dtype=np.uint8)
    scales = random.uniform(0.5, 1.5, blocks.shape[:2]) * random.choice((-1.0, 1.0), blocks.shape[:2])
    scales = (scales * cols**-0.5 / SPREAD[kind]).astype(np.float16)
    where = num_bytes - 2 if kind == GGMLQuantizationType.Q6_K else 0
    blocks[:, :, where : where + 2] = scales[:, :, None].view(np.uint8)
    if kind == GGMLQuantizationType.Q4_1:
        blocks[:, :, 2:4] = (scales * np.float16(-7.5))[:, :, None].view(np.uint8)
    return blocks.reshape(rows, -1)


def write_both(name: str, folder: Path, *, kind: GGMLQuantizationType, tokenizer: Path) -> list[Path]:
    """The file and the folder; gives their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    file, other = folder / f"{name}-{kind.name}.gguf", folder / f"{name}-bf16"
    write_gguf(file, name, kind=kind, tokenizer=tokenizer)
    write_folder(file, other)
    return [file, other]


def main(words: list[str] | None = None) -> None:
    """Write both and print where they are; what cannot be read or written ends the program with one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=[kind.name for kind in KINDS], default="Q4_1", help="(default Q4_1)")
    parser.add_argument(
        "--tokenizer", default=next(iter(BUILTIN_MODELS)), metavar="MODEL", help="default: the built-in"
    )
    options = parser.parse_args(words)
    kind = GGMLQuantizationType[options.kind]
    try:
        tokenizer = resolve_model(options.tokenizer)
        for path in write_both(options.shape, options.folder, kind=kind, tokenizer=tokenizer):
            print(path)
    except (ModelError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
