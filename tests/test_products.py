import pytest
import torch

from vlhmm import products
from vlhmm.products import fast_products, onednn_is_better

pytestmark = pytest.mark.skipif(
    not hasattr(torch.backends.mkldnn, "matmul"), reason="this torch has no setting for oneDNN's products"
)


@pytest.fixture
def fresh_choice():
    onednn_is_better.cache_clear()
    yield
    onednn_is_better.cache_clear()


@pytest.mark.parametrize("shape", [(1000, 256, 300), (64, 64, 64), (7, 5, 3), (33, 257, 65)])
def test_products_within_are_those_of_float32(shape):
    rows, inner, columns = shape
    left, right = torch.randn(rows, inner), torch.randn(inner, columns)
    exact = left.double() @ right.double()
    with fast_products():
        assert (left @ right - exact).abs().max() < 2e-6 * inner**0.5 * exact.abs().max()


def test_the_choice_is_given_back_after_an_error():
    before = torch.backends.mkldnn.matmul.fp32_precision
    with pytest.raises(ZeroDivisionError), fast_products():
        raise ZeroDivisionError
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_a_processor_that_would_round_is_left_alone(monkeypatch, fresh_choice):
    # as one with AMX, whose products have the error of bfloat16
    monkeypatch.setattr(products, "_processor", lambda: "vendor_id : AuthenticAMD")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(products, "_error", lambda *shape: 4e-3)
    before = torch.backends.mkldnn.matmul.fp32_precision
    with fast_products():
        assert torch.backends.mkldnn.matmul.fp32_precision == before


@pytest.mark.parametrize(("processor", "instructions"), [("GenuineIntel", "AVX512"), ("AuthenticAMD", "AVX2"), ("", "AVX512")])
def test_only_processors_where_mkl_is_slow_change_the_choice(monkeypatch, fresh_choice, processor, instructions):
    monkeypatch.setattr(products, "_processor", lambda: processor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    assert not onednn_is_better()


def test_rounding_to_bfloat16_would_be_seen():
    left, right = torch.randn(64, 64), torch.randn(64, 64)
    exact = left.double() @ right.double()
    rounded = (left.bfloat16() @ right.bfloat16()).double()
    assert (rounded - exact).abs().max() / exact.abs().max() > 50 * products.LARGEST_ERROR
