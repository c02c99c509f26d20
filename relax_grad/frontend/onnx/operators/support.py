"""The operators of ONNX and of ONNX Runtime: which train, which are computed without a gradient,
and which are refused.

The tables are shown in the guide, and a test holds them against the schemas of the package ``onnx``
and against the importer.
"""

from __future__ import annotations

from typing import NamedTuple


class Support(NamedTuple):
    """The state of an operator.

    Attributes
    ----------
    kind : str
        ``"trains"``; ``"forward"``, if it is imported, and no gradient passes it; or ``"refused"``.
    note : str
        A condition or a reason; the error of a refused operator has the reason too.
    """

    kind: str
    note: str = ""


#: The versions of ONNX's operators that the table covers.
FIRST_OPSET, LAST_OPSET = 7, 28

#: Operators that train without a condition.
_TRAIN = """
    Abs Acos Acosh Add AffineGrid Asin Asinh Atan Atanh Attention AveragePool BatchNormalization
    CausalConvWithState Celu Col2Im Concat Conv Cos Cosh CumProd CumSum DFT DeformConv
    DepthToSpace Det Div Einsum Elu Erf Exp Expand Flatten GRU Gather GatherElements GatherND
    Gelu Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool GridSample GroupNormalization
    HardSigmoid HardSwish Identity InstanceNormalization LRN LSTM LayerNormalization
    LinearAttention LeakyRelu Log LogSoftmax LpNormalization LpPool MatMul Max MaxPool
    MaxRoiPool MaxUnpool Mean MeanVarianceNormalization Min Mish Mul Neg
    NegativeLogLikelihoodLoss PRelu Pad Pow RMSNormalization RNN Reciprocal ReduceL1 ReduceL2
    ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum
    ReduceSumSquare Relu Reshape Resize ReverseSequence RoiAlign RotaryEmbedding Scatter
    ScatterElements ScatterND Selu Shrink Sigmoid Sin Sinh Slice Softmax SoftmaxCrossEntropyLoss
    Softplus Softsign STFT SpaceToDepth Split Sqrt Squeeze Sub Sum SwiGLU Swish Tan Tanh
    TensorScatter ThresholdedRelu Tile TopK Transpose Trilu Unsqueeze Upsample Where
"""

#: Operators whose results are integers, truth values or shapes, or steps, whose derivative is 0 or
#: does not exist.
_NO_DERIVATIVE = """
    And ArgMax ArgMin BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Ceil Equal Floor Greater
    GreaterOrEqual Hardmax IsInf IsNaN Less LessOrEqual MatMulInteger NonMaxSuppression NonZero Not
    Or Round Shape Sign Size Unique Xor
"""

#: Operators whose result is computed from attributes, shapes and constants.
_CREATE = (
    "BlackmanWindow Constant ConstantOfShape EyeLike HammingWindow HannWindow MelWeightMatrix "
    "OneHot Range"
)

#: Operators that draw random numbers.
_DRAW = "Bernoulli RandomNormal RandomNormalLike RandomUniform RandomUniformLike"

_SEQUENCES = """
    ConcatFromSequence SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert
    SequenceLength SplitToSequence
"""

#: Operators of sequences and optional values.
_OPTIONAL = "Optional OptionalGetElement OptionalHasElement"

_FLOATS = (
    "import the float model, or one with QuantizeLinear and DequantizeLinear around float "
    "weights (onnxruntime.quantization: quant_format=QuantFormat.QDQ, "
    "extra_options={'AddQDQPairToWeight': True})"
)
_INTEGERS = f"it multiplies integers, which have no gradient; {_FLOATS}"
_STRINGS = "it takes strings, which TVM does not have; compute them before the model"

_STANDARD = {
    **dict.fromkeys(_TRAIN.split(), Support("trains")),
    **dict.fromkeys(_NO_DERIVATIVE.split(),
    Support("forward", "its derivative is 0, or does not exist")),
    **dict.fromkeys(_CREATE.split(),
    Support("forward", "its operands are shapes, settings and constants")),
    **dict.fromkeys(_DRAW.split(), Support("forward", "it draws with the seed of the function")),
    **dict.fromkeys(_SEQUENCES.split(), Support("trains", "in sequences of known length")),
    **dict.fromkeys(_OPTIONAL.split(),
    Support("trains", "where the value is there or not before the run")),
    **dict.fromkeys(("QLinearConv", "QLinearMatMul"), Support("refused", _INTEGERS)),
    "ConvInteger": Support("refused", "outside of the products that dynamic quantisation writes, "
                                      + _INTEGERS),
    **dict.fromkeys(("RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit"),
    Support("refused", _STRINGS)),
    "BitCast": Support("refused", "it reads the bits of numbers, which have no gradient; compute "
                                  "them before the model"),
    "Cast": Support("trains", "between floating-point types"),
    "CastLike": Support("trains", "between floating-point types"),
    "CenterCropPad": Support("trains"),
    "Clip": Support("trains", "its bounds are constants or data"),
    "Compress": Support("trains", "with a constant condition"),
    "ConvTranspose": Support("trains", "its output_shape needs known extents"),
    "DequantizeLinear": Support("forward", "its operand is an integer; after QuantizeLinear of "
                                           "the same scale, both train"),
    "Dropout": Support("trains", "its ratio and training_mode are constants"),
    "DynamicQuantizeLinear": Support("forward", "it returns integers; before products of "
                                                "dynamic quantisation, its operand trains"),
    "If": Support("trains", "its condition is known before the run"),
    "ImageDecoder": Support("refused", "it reads files of images; decode them before the model"),
    "Loop": Support("trains", "with a known number of trips, at most 256, which are written out"),
    "Mod": Support("trains", "with fmod=1"),
    "Multinomial": Support("refused", "it draws classes, through which no gradient passes; draw "
                                      "outside the model"),
    "QuantizeLinear": Support("forward", "it returns integers; before DequantizeLinear of the "
                                         "same scale, both train"),
    "Scan": Support("trains", "with a known number of trips, at most 256, which are written out"),
    "SequenceMap": Support("refused", "it is not supported; export the steps written out"),
    "TfIdfVectorizer": Support("refused", "it counts n-grams of integers or strings; compute "
                                          "them before the model"),
}  # fmt: skip
_STANDARD["OneHot"] = Support("forward", "its depth is a constant or an extent")

#: The operators of ONNX's own domain by their names.
STANDARD_OPERATORS: dict[str, Support] = dict(sorted(_STANDARD.items()))

_CACHE = (
    "it keeps keys and values of earlier steps for generation; export the model without caches "
    "(use_cache=False)"
)
_QUANTISED = f"it computes with integers; {_FLOATS}"
_GENERATION = "it generates sequences; import the model that is within"
_LAYOUT = (
    "it has the layout of an execution provider; save the model optimised at the extended level "
    "(ORT_ENABLE_EXTENDED)"
)

_FUSED = """
    BiasGelu EmbedLayerNormalization FastGelu Gelu QuickGelu SimplifiedLayerNormalization
    SkipLayerNormalization SkipSimplifiedLayerNormalization FusedGemm BiasAdd BiasSplitGelu
    FusedMatMul GatedAdd GatedRMSNorm GemmFastGelu GridSample LinearAttentionGate ScaledSiLU
    SkipGroupNorm SwiGLU Trilu
"""

_QUANTISED_OPERATORS = """
    DynamicQuantizeLSTM DynamicQuantizeMatMul MatMulIntegerToFloat QAttention
    QEmbedLayerNormalization QGemm QLinearAdd QLinearAveragePool QLinearConcat QLinearConv
    QLinearGlobalAveragePool QLinearLeakyRelu QLinearMul QLinearReduceMean QLinearSigmoid
    QLinearSoftmax QLinearWhere MatMulBnb4 MatMulFpQ4 GatherBlockQuantized QMoE
"""

_CACHED = """
    DecoderAttention DecoderMaskedMultiHeadAttention DecoderMaskedSelfAttention PagedAttention
    SparseAttention
"""

_GENERATORS = """
    BeamSearch GreedySearch Sampling WhisperBeamSearch
"""

_MICROSOFT = {
    **dict.fromkeys(
        _FUSED.split(),
        Support("trains"),
    ),
    **dict.fromkeys(
        _QUANTISED_OPERATORS.split(),
        Support("refused", _QUANTISED),
    ),
    **dict.fromkeys(
        _CACHED.split(),
        Support("refused", _CACHE),
    ),
    **dict.fromkeys(
        _GENERATORS.split(),
        Support("refused", _GENERATION),
    ),
    **dict.fromkeys(("NhwcConv", "NhwcFusedConv", "NhwcMaxPool"), Support("refused", _LAYOUT)),
    **dict.fromkeys(
        ("PackedAttention", "PackedMultiHeadAttention", "RemovePadding", "RestorePadding"),
        Support("refused", "it packs sequences of different lengths; optimise the model without "
                           "packing"),
    ),
    "Attention": Support("trains", "without past and do_rotary; masks of the keys and of pairs"),
    "DequantizeLinear": Support("forward", "after QuantizeLinear of the same scale, both train"),
    "FusedConv": Support("trains", "with the activations Relu, Sigmoid, Tanh, LeakyRelu, Clip, "
                                   "HardSigmoid and Elu"),
    "FusedMatMulActivation": Support("trains", "with the activations of FusedConv"),
    "BiasDropout": Support("trains", "its ratio and training_mode are constants"),
    "CausalConvWithState": Support("trains", "along one axis"),
    "GatedRelativePositionBias": Support("trains", "of queries with padding"),
    "LinearAttention": Support("trains", "without state_window"),
    "GroupNorm": Support("trains", "of pictures, without an activation or with SiLU"),
    "BiasSoftmax": Support("trains"),
    "GroupQueryAttention": Support("trains", "without past"),
    "MatMulNBits": Support("trains", "its weight is frozen; 2, 4 or 8 bits; groups of g_idx "
                                     "have block_size columns, all but one"),
    "MultiHeadAttention": Support("trains", "without past"),
    "TransposeMatMul": Support("trains"),
    "QuantizeLinear": Support("forward", "before DequantizeLinear of the same scale, both train"),
    "RotaryEmbedding": Support("trains", "without is_packed_batching and scale"),
}  # fmt: skip

#: The operators of ONNX Runtime's domain, ``com.microsoft``, by their names: those that its
#: optimizer writes.
MICROSOFT_OPERATORS: dict[str, Support] = dict(sorted(_MICROSOFT.items()))


#: The reasons for nodes of operators that train under conditions.
_CONDITIONS = {
    **dict.fromkeys(
        ("BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix"),
        "its operands are constants only; give them: constants={...}",
    ),
    "Loop": "its trips are written out if their number is a constant or computed from known "
    "extents, at most 256, and its condition does not change; give the extents of the "
    "inputs: shapes={...}",
    "Scan": "its trips are written out if their number is known and at most 256; give the "
    "extents of the inputs: shapes={...}",
}


def reason_of(kind: str) -> str:
    """Return why an operator is refused; its name may have a domain. An operator that is not
    refused has no reason."""
    domain, _, name = kind.rpartition(".")
    if domain == "com.microsoft.nchwc":
        return _LAYOUT
    table = {"": STANDARD_OPERATORS, "com.microsoft": MICROSOFT_OPERATORS}.get(domain, {})
    support = table.get(name)
    if support is not None and support.kind == "refused":
        return support.note
    if kind in _CONDITIONS:
        return _CONDITIONS[kind]
    return "" if support is not None else "it is no operator of ONNX that is known here"
