"""Which matrices of a model does its checkpoint store in a format of their own, by config.json, and
how many bytes do they take?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.parts import ROUTER, Part, expected_tensors, layer_tensors, parts
from ridgeline.architectures.quantization_scheme import (
    CHECKPOINT_FORMATS,
    Scheme,
    raw_name,
    tensors_of,
)
from ridgeline.architectures.scheme_match import Find, check_work
from ridgeline.architectures.spec import LayerSpec, ModelSpec
from ridgeline.architectures.tensor_layouts import (
    Cut,
    checkpoint_pattern,
    checkpoint_shapes,
    cuts,
    layer_cuts,
    unstacked,
    untransposed,
)
from ridgeline.registry import opened

KEY = "quantization_config"
SCALES = "ridgeline_scale_dtype"  # that of the scales, which the reader of the files adds

SHARED = ("embedding", "lm_head")


@dataclass(frozen=True, slots=True)
class MatrixScheme:
    """`name` is the one that the matrix would have if it were stored as numbers."""

    name: str
    rows: int
    columns: int
    scheme: Scheme


def described(spec: ModelSpec, config: ConfigReader) -> ModelSpec:
    """The spec with what `quantization_config` says of its matrices. ConfigError names the key that
    is not supported, and the way out."""
    section = config.section(KEY)
    if section is None:
        return spec
    method = section.text("quant_method")
    if method == "mxfp4" and any(one.mxfp4 for one in spec.tensor_layouts):
        return spec
    line = CHECKPOINT_FORMATS.get(method)
    if line is None:
        raise section.fail(
            "quant_method",
            f"is {method[:40]!r}; read are {', '.join(CHECKPOINT_FORMATS)}: convert the"
            " checkpoint to one of them, or serve the 16-bit one that it was made from",
        )
    scale_dtype = section.text(SCALES, default=line.scale_dtype or spec.dtype)
    if scale_dtype not in ("float32", "float16", "bfloat16"):
        raise section.fail(SCALES, f"is {scale_dtype[:40]!r}, no dtype of scales")
    find: Find = opened(line.config)(section, scale_dtype)
    separate = unstacked(spec)
    experts = (name for name, part in layer_tensors(separate, 0).items() if part.is_experts)
    if any(find(name.removesuffix(".weight")) for name in experts):
        spec = separate
    shapes = checkpoint_shapes(untransposed(spec))
    check_work(section, len(shapes))
    layers = [
        replace(layer, schemes=tuple(_of_layer(spec, index, layer, find, shapes, section)))
        for index, layer in enumerate(spec.layers)
    ]
    return replace(spec, layers=tuple(layers), schemes=tuple(_of_vocabulary(spec, find, section)))


def _of_layer(
    spec: ModelSpec,
    index: int,
    layer: LayerSpec,
    find: Find,
    shapes: Mapping[str, tuple[int, ...]],
    section: ConfigReader,
) -> Iterator[tuple[str, Scheme]]:
    cut = dict(layer_cuts(spec, index))
    for part in _matrices(spec, layer):
        role = part.role
        names = [name for name in _names(spec, index, part) if name in shapes]
        found = {find(name.removesuffix(".weight")) for name in names}
        if len(found) > 1:
            raise section.fail(
                "quant_method",
                f"stores the {role} matrices of layer {index}'s experts in several ways, which is"
                " not supported; serve the 16-bit checkpoint that it was made from",
            )
        for scheme in found:
            if scheme is not None:
                _check_fits(section, scheme, names[0], shapes[names[0]])
                own = cut.get(spec.tensor_names[role].format(layer=index, expert=0))
                yield role, scheme if _is_kept(scheme, own, cut) else replace(scheme, keeps="")


def _is_kept(scheme: Scheme, cut: Cut | None, every: Mapping[str, Cut]) -> bool:
    """A matrix within a tensor is kept as it is stored if the rows of all that the tensor holds lie
    together, in the same order, and begin with a word of it."""
    alike = [] if cut is None else [one for one in every.values() if one.name == cut.name]
    dims = [dim for raw in tensors_of(scheme) for dim in raw.dims if dim.of == "rows"]
    return all(
        one.num_strides == 1
        and one.expert is None
        and not one.order
        and all(dim.divides(one.start) for dim in dims)
        for one in alike
    )


def _matrices(spec: ModelSpec, layer: LayerSpec) -> list[Part]:
    """Those that a quantizer may have touched."""
    every = parts(layer, spec.hidden_size)
    return [part for part in every if part.product not in ("", ROUTER)]


def _names(spec: ModelSpec, index: int, part: Part) -> list[str]:
    """Of the matrices of this role, one for each expert where there are some."""
    pattern = checkpoint_pattern(spec, part.role)
    if part.is_experts:
        pattern = spec.tensor_names.get(f"expert_{part.role}", pattern)
    numbers = range(part.copies if "{expert}" in pattern else 1)
    return [pattern.format(layer=index, expert=number) for number in numbers]


def _of_vocabulary(
    spec: ModelSpec, find: Find, section: ConfigReader
) -> Iterator[tuple[str, Scheme]]:
    for role in SHARED:
        if role == "embedding" or spec.tie_embeddings:
            continue  # compressed-tensors calls it no Linear, and no other method knows it
        name = spec.tensor_names[role]
        scheme = find(name.removesuffix(".weight"))
        if scheme is not None:
            _check_fits(section, scheme, name, (spec.vocab_size, spec.hidden_size))
            yield role, scheme


def _check_fits(section: ConfigReader, scheme: Scheme, name: str, shape: tuple[int, ...]) -> None:
    """Groups divide a row: a last one that is shorter has no reader."""
    columns = shape[1]
    if scheme.group and not scheme.block_rows and columns % scheme.group:
        raise section.fail(
            "group_size", f"is {scheme.group}; it does not divide the {columns} columns of {name}"
        )


# ------------------------------------------------------------------------ of a spec


def matrix_schemes(spec: ModelSpec) -> tuple[MatrixScheme, ...]:
    """All matrices of layers and vocabulary that are stored in a format of their own."""
    return (*layer_matrices(spec), *vocabulary_matrices(spec))


def layer_matrices(spec: ModelSpec) -> Iterator[MatrixScheme]:
    if not any(layer.schemes for layer in spec.layers):
        return
    shapes = checkpoint_shapes(spec)
    for index, layer in enumerate(spec.layers):
        found: dict[str, Scheme] = {}
        for part in _matrices(spec, layer):
            if (scheme := layer.scheme_of(part.role)) is not None:
                found |= dict.fromkeys(_names(spec, index, part), scheme)
        for name, scheme in found.items():
            rows, columns = shapes[name]
            yield MatrixScheme(name, rows, columns, scheme)


def kept_matrices(spec: ModelSpec) -> Iterator[MatrixScheme]:
    """Those of layers that can be served as they are stored."""
    return (matrix for matrix in layer_matrices(spec) if matrix.scheme.keeps)


def unpacked_matrices(spec: ModelSpec) -> tuple[MatrixScheme, ...]:
    """Those that are always served as numbers: of the vocabulary all."""
    return tuple(one for one in layer_matrices(spec) if not one.scheme.keeps) + tuple(
        vocabulary_matrices(spec)
    )


def vocabulary_matrices(spec: ModelSpec) -> Iterator[MatrixScheme]:
    for role, scheme in spec.schemes:
        yield MatrixScheme(spec.tensor_names[role], spec.vocab_size, spec.hidden_size, scheme)


def is_quantized(spec: ModelSpec) -> bool:
    """Some matrix of a layer can be served as it is stored."""
    return any(scheme.keeps for layer in spec.layers for _, scheme in layer.schemes)


def checkpoint_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """As `checkpoint_shapes`, of the tensors that the checkpoint has in place of such matrices."""
    found = checkpoint_shapes(spec)
    for matrix in matrix_schemes(spec):
        del found[matrix.name]
        for raw in tensors_of(matrix.scheme):
            if not raw.is_optional and not raw.is_any:
                found[raw_name(matrix.name, raw)] = raw.shape(matrix.rows, matrix.columns)
    return found


def optional_checkpoint_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Tensors of such matrices that may be missing."""
    return {
        raw_name(matrix.name, raw): raw.shape(matrix.rows, matrix.columns)
        for matrix in matrix_schemes(spec)
        for raw in tensors_of(matrix.scheme)
        if raw.is_optional
    }


def scheme_text(spec: ModelSpec) -> str:
    """What is stored how, for people, the most frequent first."""
    counts: dict[str, int] = {}
    for matrix in matrix_schemes(spec):
        counts[matrix.scheme.text] = counts.get(matrix.scheme.text, 0) + 1
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return "; ".join(f"{count} x {what}" if len(counts) > 1 else what for what, count in ordered)


def tensors_read(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """As `expected_tensors`, of the tensors that are read where matrices of layers are kept as they
    are stored."""
    within = {name: cut.name for name, cut in cuts(spec).items()}
    matrices = list(kept_matrices(spec))
    kept = {matrix.name for matrix in matrices}
    found = {n: s for n, s in expected_tensors(spec).items() if within.get(n, n) not in kept}
    for matrix in matrices:
        for raw in tensors_of(matrix.scheme):
            if raw.is_read and not raw.is_optional:
                found[raw_name(matrix.name, raw)] = raw.shape(matrix.rows, matrix.columns)
    return found
