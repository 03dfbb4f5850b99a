"""Whether the length of a program is known to depend on an assumed value: loops as people write them."""

from __future__ import annotations

import itertools
import math
import sys

import pytest
import torch

MOST = 6


def loss_now() -> torch.Tensor:
    return torch.randn(4, device="cuda").square().mean()


def accuracy() -> float:
    """A value that is read in a function, and returned."""
    correct = total = 0
    for _ in range(2):
        correct += (torch.randn(8, 3, device="cuda").argmax(1) == torch.randint(3, (8,), device="cuda")).sum().item()
        total += 8
    return correct / total


class EarlyStopping:
    """The one that everybody has."""

    def __init__(self, patience=2):
        self.patience, self.bad, self.best, self.early_stop = patience, 0, None, False

    def __call__(self, loss):
        if self.best is None or loss < self.best:
            self.best, self.bad = loss, 0
        else:
            self.bad += 1
            self.early_stop = self.bad >= self.patience


class Watch:
    """The same under a name that says nothing, and with the tensor."""

    def __init__(self):
        self.best, self.is_over = math.inf, False

    def update(self, loss):
        if loss < self.best:
            self.best = loss.detach()
        else:
            self.is_over = True
        return self.is_over


class Trainer:
    """Whose loop is in one method, and whose loss in another."""

    def __init__(self):
        self.loss, self.losses, self.epoch = math.inf, [], 0

    def one(self):
        self.epoch += 1
        self.loss = loss_now().item()
        self.losses.append(self.loss)

    def fit(self):
        while self.loss > 0.1 and self.epoch < MOST:
            self.one()

    def fit_epochs(self):
        while self.epoch < MOST:
            self.one()


def while_a_tensor():
    rounds = 0
    while loss_now() < 2 and rounds < MOST:
        rounds += 1


def while_a_number():
    loss, rounds = math.inf, 0
    while loss > 0.5 and rounds < MOST:
        loss = loss_now().item()
        rounds += 1


def break_by_a_number():
    for _ in range(MOST):
        loss = loss_now()
        loss.item()
        if float(loss) < 1e-3:
            break


def return_from_a_loop():
    for step in range(MOST):
        if (loss_now() < 0.1).item():
            return step
    return MOST


def patience():
    best, bad = 0.0, 0
    for _ in range(MOST):
        now = accuracy()
        if now > best:
            best, bad = now, 0
        else:
            bad += 1
        if bad >= 3:
            break


def an_object_stops():
    stopper = EarlyStopping()
    for _ in range(MOST):
        stopper(loss_now().item())
        if stopper.early_stop:
            break


def an_object_reads_and_stops():
    watch = Watch()
    for _ in range(MOST):
        if watch.update(loss_now()):
            break


def an_object_reads_and_is_asked():
    watch = Watch()
    for _ in range(MOST):
        watch.update(loss_now())
        if watch.is_over:
            break


def two_methods():
    Trainer().fit()


def end_of_sequence():
    ids = torch.ones(2, 1, dtype=torch.long, device="cuda")
    for _ in range(MOST):
        logits = torch.randn(2, 50, device="cuda")
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
        if (ids[:, -1] == 7).all():
            break


def unfinished_sequences():
    unfinished = torch.ones(2, dtype=torch.long, device="cuda")
    length = 0
    while unfinished.max() != 0 and length < MOST:
        unfinished = unfinished & ~(torch.randn(2, 50, device="cuda").argmax(-1) == 7)
        length += 1


def a_count_of_rounds():
    rounds = torch.randint(1, 9, (), device="cuda").item()
    return [loss_now() for _ in range(rounds)]


def rows_that_were_found():
    boxes = (torch.randn(6, device="cuda") > 0).nonzero()
    for _ in boxes:
        loss_now()


def a_queue_of_boxes():
    scores = torch.randn(6, device="cuda")
    order = scores[scores > 0]
    while order.numel() > 2:
        order = order[1:]


def kept_in_a_list():
    losses: list[float] = []
    while len(losses) < MOST:
        losses.append(loss_now().item())
        if len(losses) > 2 and losses[-1] >= losses[-2]:
            break


def flag_and_history():
    is_done, history = False, {"loss": []}
    for step in itertools.count():
        if is_done or step == MOST:
            break
        history["loss"].append(loss_now().item())
        is_done = sum(history["loss"]) > 100


def stops_by_an_error():
    class StopTraining(Exception):
        pass

    try:
        for _ in range(MOST):
            if loss_now().item() < 0.1:
                raise StopTraining
    except StopTraining:
        pass


def from_a_generator():
    def losses():
        while True:
            yield loss_now().item()

    for step, loss in enumerate(losses()):
        if loss < 0.1 or step == MOST:
            break


def in_a_lambda():
    return (lambda: while_a_number())()


def all_in_a_lambda():
    return (lambda: [loss_now() for _ in range(torch.randn(MOST, device="cuda").argmax())])()


def named_in_the_condition():
    rounds = 0
    while (loss := loss_now().item()) > 0.5 and rounds < MOST:
        rounds += loss > 0


DEPENDS = [
    while_a_tensor, while_a_number, break_by_a_number, return_from_a_loop, patience, an_object_stops, an_object_reads_and_stops,
    an_object_reads_and_is_asked, two_methods, end_of_sequence, unfinished_sequences, a_count_of_rounds, rows_that_were_found,
    a_queue_of_boxes, kept_in_a_list, flag_and_history, stops_by_an_error, from_a_generator, in_a_lambda, all_in_a_lambda,
    named_in_the_condition,
]  # fmt: skip


def logging():
    total, metrics, history = 0.0, {}, []
    bar = list(range(MOST))
    for step in bar:
        loss = loss_now()
        total += loss.item()
        history.append(loss.item())
        metrics["loss"] = loss.item()
        bar.index(step)
        print(f"{step}: {loss.item():.3f}, {total / (step + 1)}")
    for name, value in metrics.items():
        print(name, value)
    for value in history:
        print(value)
    while len(history) > 2:
        history.pop()


def the_best_is_saved():
    best = 0.0
    for _ in range(MOST):
        now = accuracy()
        if now > best:
            best = now
            torch.save({"best": best}, "/dev/null")


def checks_for_nan():
    for _ in range(MOST):
        loss = loss_now()
        if not math.isfinite(loss.item()):
            sys.exit(1)
        if torch.isnan(loss):
            break


def bad_input_is_refused():
    for _ in range(MOST):
        ids = torch.randint(9, (4,), device="cuda")
        if ids.max() > 8:
            raise ValueError("too large")


def a_schedule():
    model = torch.nn.Linear(4, 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(2):
        loss = model(torch.randn(2, 4, device="cuda")).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step(loss.item())


def epochs_of_a_trainer():
    Trainer().fit_epochs()


def masked_loss():
    for _ in range(MOST):
        logits, labels = torch.randn(8, 5, device="cuda"), torch.randint(5, (8,), device="cuda")
        kept = logits[labels != 0]
        loss = kept.sum()
        for one in (loss, kept):
            one.sum()


def steps_are_counted():
    step = 0
    while True:
        loss = loss_now().item()
        step += 1
        if step >= MOST:
            break
    return loss


NOT = [
    logging, the_best_is_saved, checks_for_nan, bad_input_is_refused, a_schedule, epochs_of_a_trainer, masked_loss,
    steps_are_counted,
]  # fmt: skip


@pytest.mark.parametrize(
    ("program", "depends"),
    [(one, one in DEPENDS) for one in (*DEPENDS, *NOT)],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_length_that_depends_on_a_value_is_found(fake, program, depends):
    program()
    assert fake.assumed
    found = [one.key for one in fake.assumed.values() if one.decides == "length"]
    assert bool(found) is depends, found


def test_without_source_what_is_read_again_is_taken_for_a_condition(fake):
    names = {"now": loss_now, "__name__": "__main__"}
    exec("now().item()", names)
    assert not any(one.decides for one in fake.assumed.values())
    exec("for _ in range(3): now().item()", names)
    assert [one.decides for one in fake.assumed.values()][-1] == "length"
