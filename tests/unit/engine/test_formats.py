from __future__ import annotations

import pytest
import torch

from freetoken.engine import formats
from freetoken.engine.linears import PackedLinear

GENERATOR = torch.Generator().manual_seed(3)


def random_bytes(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=GENERATOR)


def naive_fp4(packed: torch.Tensor) -> torch.Tensor:
    values = []
    for byte in packed.reshape(-1).tolist():
        values += [formats.E2M1[byte & 15], formats.E2M1[byte >> 4]]
    return torch.tensor(values).view(*packed.shape[:-1], packed.shape[-1] * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [6, 7])
def test_every_byte_unpacks_to_its_two_values_low_nibble_first(dtype: torch.dtype, width: int) -> None:
    packed = (
        torch.arange(256, dtype=torch.uint8)[: width * 36].view(36, width) if width == 7 else random_bytes(43, width)
    )
    unpacked = formats.unpack_fp4(packed, dtype)
    assert unpacked.dtype == dtype
    assert torch.equal(unpacked.float(), naive_fp4(packed))


def test_large_blocks_unpack_alike_in_several_threads() -> None:
    packed = random_bytes(2, 300, 256)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(formats.unpack_fp4(packed, torch.float32), naive_fp4(packed))
    finally:
        torch.set_num_threads(before)


def test_nvfp4_is_code_times_block_scale_times_the_scale_of_its_half() -> None:
    packed = random_bytes(2, 4, 16)
    scales = random_bytes(2, 4, 2, high=0x7F).view(torch.float8_e4m3fn)
    whole = torch.tensor([[0.5, 2.0], [3.0, 0.25]])
    got = formats.dequantize_fp4(packed, formats.scale_of_nvfp4(scales, whole), torch.float32)
    wide = scales.float().repeat_interleave(16, dim=2) * whole.repeat_interleave(2, dim=1)[:, :, None]
    assert torch.equal(got, naive_fp4(packed) * wide)


def test_mxfp4_scales_are_powers_of_two() -> None:
    assert formats.scale_of_mxfp4(torch.tensor([126, 127, 130], dtype=torch.uint8)).tolist() == [0.5, 1.0, 8.0]


@pytest.mark.parametrize("parts", [1, 2, 6])
def test_fp8_scales_apply_to_equal_ranges_of_rows(parts: int) -> None:
    codes = torch.randn(6, 8, generator=GENERATOR).to(torch.float8_e4m3fn)
    scales = torch.rand(parts, generator=GENERATOR)
    expected = codes.float() * scales.repeat_interleave(6 // parts)[:, None]
    assert torch.equal(formats.dequantize_fp8(codes, scales, torch.float32), expected)


def test_fp8_blocks_at_the_edge_are_cut_short() -> None:
    codes = torch.ones(130, 200).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    got = formats.dequantize_fp8_block(codes, scales, torch.float32)
    assert [got[0, 0], got[0, 199], got[129, 0], got[129, 199]] == [1.0, 2.0, 3.0, 4.0]
    assert got.shape == (130, 200)


@pytest.mark.parametrize("kind", ["fp8", "fp8 by row", "nvfp4"])
def test_a_packed_linear_equals_a_plain_one_also_in_blocks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bias = torch.randn(64, generator=GENERATOR)
    if kind == "nvfp4":
        weight, whole = random_bytes(64, 16), torch.tensor([0.3])
        scale = random_bytes(64, 2, low=40, high=80).view(torch.float8_e4m3fn)
        plain = formats.dequantize_fp4(weight, formats.scale_of_nvfp4(scale, whole), torch.float32)
        linear = PackedLinear(weight, scale, whole, bias)
    else:
        weight = torch.randn(64, 32, generator=GENERATOR).to(torch.float8_e4m3fn)
        scale = torch.rand(64 if kind == "fp8 by row" else 1, generator=GENERATOR)
        plain = formats.dequantize_fp8(weight, scale, torch.float32)
        linear = PackedLinear(weight, scale, None, bias)
    hidden = torch.randn(2, 3, 32, generator=GENERATOR)
    expected = torch.nn.functional.linear(hidden, plain, bias)
    assert (linear.out_features, linear.in_features) == (64, 32)
    assert torch.allclose(linear(hidden), expected, atol=1e-5)
    monkeypatch.setattr("freetoken.engine.linears._BLOCK_BYTES", 24 * 32 * 4)  # 24 rows at a time, the last 16
    assert torch.allclose(linear(hidden), expected, atol=1e-5)
