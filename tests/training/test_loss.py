"""The loss in chunks is the loss, and its gradients are the gradients."""
import pytest
import torch
import torch.nn.functional as F

import training.step.loss
from training.step.loss import cross_entropy, distillation, linear_cross_entropy

C, V = 16, 37
# 3 rows per chunk: one chunk, one row more, several chunks, a remainder
ROWS = pytest.mark.parametrize('n', [3, 4, 6, 20])


@pytest.fixture(autouse=True)
def three_rows(monkeypatch):
    """Use chunks of 3 rows, except with torch.compile, and parts of 16 words with a remainder."""
    monkeypatch.setattr(training.step.loss, 'CHUNK_BYTES', {'cpu': 4 * V * 3})
    monkeypatch.setattr(training.step.loss, 'WORDS', 16)


def problem(n, dtype=torch.float64, ignored=()):
    generator = torch.Generator().manual_seed(n)
    x, weight = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
                 for shape in ((n, C), (V, C)))
    targets = torch.randint(V, (n,), generator=generator)
    targets[list(ignored)] = -1
    return x.requires_grad_(), weight.requires_grad_(), targets


def plain(x, weight, targets):
    return cross_entropy(F.linear(x, weight), targets)


def with_gradients(form, x, weight, targets, factor=1.0):
    loss = form(x, weight, targets)
    return loss.detach(), *torch.autograd.grad(loss * factor, (x, weight))


def gaps(found, wanted):
    """Relative differences of the loss and of each gradient."""
    return [((a - b).norm() / b.norm()).item() for a, b in zip(found, wanted)]


@ROWS
@pytest.mark.parametrize('dtype, bound, ignored', [
    (torch.float64, 1e-12, ()), (torch.float64, 1e-12, (0, 1, 2)), (torch.float32, 1e-6, (1,))])
def test_loss_and_gradients(n, dtype, bound, ignored):
    given = problem(n, dtype, ignored if len(ignored) < n else ())
    found, wanted = (with_gradients(form, *given, factor=-2.5)
                     for form in (linear_cross_entropy, plain))
    assert [x.dtype for x in found] == [dtype] * 3 and max(gaps(found, wanted)) < bound


@pytest.mark.parametrize('grad', [True, False])
def test_it_never_holds_all_logits(recorded, grad):
    seen = recorded(training.step.loss.F, 'linear', lambda x, weight: len(x))
    with torch.set_grad_enabled(grad):
        loss = linear_cross_entropy(*problem(20))
    assert seen == [3] * 6 + [2] and loss.requires_grad == grad


@pytest.mark.parametrize('half', [torch.bfloat16, torch.float16], ids=['bf16', 'fp16'])
@pytest.mark.parametrize('n', [20, 300])
def test_under_autocast_it_is_as_near_to_the_truth_as_the_plain_form(half, n):
    given = problem(n, torch.float32, ignored=(2, 5))
    truth = with_gradients(plain, *given)
    with torch.autocast('cpu', half):
        forms = [with_gradients(form, *given) for form in (linear_cross_entropy, plain)]
    assert [x.dtype for x in forms[0]] == [torch.float32] * 3
    mine, theirs = (gaps(form, truth) for form in forms)
    assert max(mine) < 4 * torch.finfo(half).eps
    assert all(a <= 1.1 * b + 1e-6 for a, b in zip(mine, theirs)), (mine, theirs)


def test_a_second_backward_is_refused():
    x, weight, targets = problem(7)
    loss = linear_cross_entropy(x, weight, targets)
    loss.backward()
    with pytest.raises(RuntimeError, match='second time'):
        loss.backward()


def test_extreme_logits_neither_overflow_nor_lose_the_sum():
    x, weight, targets = problem(7, torch.float32)
    with torch.no_grad():
        x.mul_(1e4)
    wide = [a.detach().double().requires_grad_() for a in (x, weight)]
    truth = with_gradients(plain, *wide, targets)
    mine, theirs = (gaps(with_gradients(form, x, weight, targets), truth)
                    for form in (linear_cross_entropy, plain))
    # logits of 1e5 are rounded by 0.004
    assert truth[0] > 1e5 and max(mine) < max(1e-3, 2 * max(theirs))


def test_with_a_frozen_weight_without_gradients_and_without_targets():
    x, weight, targets = problem(7)
    wanted = with_gradients(plain, x, weight, targets)
    loss = linear_cross_entropy(x, weight.detach(), targets)
    loss.backward()
    assert max(gaps((loss.detach(), x.grad), wanted)) < 1e-12
    with torch.no_grad():
        assert max(gaps([linear_cross_entropy(x, weight, targets)], wanted)) < 1e-12
        none = torch.full_like(targets, -1)
        assert linear_cross_entropy(x, weight, none).isnan() and plain(x, weight, none).isnan()


def test_float16_keeps_small_gradients_for_the_loss_scale(monkeypatch):
    """With a large vocabulary most gradients underflow in float16 unless the loss is scaled."""
    torch.manual_seed(0)
    x, w, y = torch.randn(600, 16), 0.02 * torch.randn(10000, 16), torch.randint(50, (600,))
    monkeypatch.setitem(training.step.loss.CHUNK_BYTES, 'cpu', 40000 * 100)
    found = {}
    for form in ('truth', 'whole', 'chunked'):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        with torch.autocast('cpu', torch.float16, enabled=form != 'truth'):
            value = (linear_cross_entropy if form == 'chunked' else plain)(a, b, y)
        (65536.0 * value).backward()
        found[form] = a.grad, b.grad[50:]
    for whole, chunked, truth in zip(found['whole'], found['chunked'], found['truth']):
        assert (chunked - truth).norm() < 2 * (whole - truth).norm() < 1e-2 * truth.norm()


@ROWS
def test_distillation_is_the_divergence_from_the_teacher(n, recorded):
    """In chunks, with tokens that do not count, and a teacher of another width."""
    x, weight, targets = problem(n, ignored=(1,))
    teacher, teacher_weight = (torch.randn(k, C + 5, dtype=torch.float64) for k in (n, V))

    def whole(x, weight, targets):
        ours, theirs = (x @ weight.T).softmax(-1), (teacher @ teacher_weight.T).softmax(-1)
        return (theirs * (theirs / ours).log()).sum(-1)[targets >= 0].mean()
    given = x, weight, targets
    wanted = with_gradients(whole, *given, factor=-2.5)
    seen = recorded(training.step.loss.F, 'linear', lambda x, weight: len(x))
    found = with_gradients(lambda *given: distillation(*given, teacher, teacher_weight), *given,
                           factor=-2.5)
    assert max(gaps(found, wanted)) < 1e-12 and max(seen) == 3
    assert distillation(*given, x.detach(), weight.detach()).abs() < 1e-15


@pytest.mark.parametrize('half', [torch.bfloat16, torch.float16], ids=['bf16', 'fp16'])
def test_distillation_sums_the_gradients_of_its_chunks_in_float32(half, monkeypatch):
    """As near to the truth in 100 chunks as in one."""
    given = problem(300, torch.float32)
    teacher, teacher_weight = torch.randn(300, C), torch.randn(V, C)

    def form(*given):
        return distillation(*given, teacher, teacher_weight)
    truth = with_gradients(form, *given)
    with torch.autocast('cpu', half):
        chunked = with_gradients(form, *given)
        monkeypatch.setattr(training.step.loss, 'CHUNK_BYTES', {'cpu': 2 ** 20})
        whole = with_gradients(form, *given)
    mine, theirs = gaps(chunked, truth), gaps(whole, truth)
    assert all(a <= 1.1 * b + 1e-6 for a, b in zip(mine, theirs)), (mine, theirs)
