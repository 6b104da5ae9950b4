"""eval.common.cuda_graphs.py: training with replays is training."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments

from eval.common import cuda_graphs
from eval.common.cuda_graphs import GraphTrainer


class Rows(torch.utils.data.Dataset):
    """Ten rows, so that batches of four end with one of two."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(3, generator=generator), "labels": torch.tensor(index % 2)}


class Classifier(nn.Module):
    """Classifies x by one linear layer; another parameter is never used."""

    def __init__(self):
        super().__init__()
        self.linear, self.unused = nn.Linear(3, 2), nn.Parameter(torch.ones(1))

    def forward(self, x):
        return {"logits": self.linear(x)}


def fit(trainer_class, folder):
    torch.manual_seed(0)
    model = Classifier()
    arguments = TrainingArguments(
        output_dir=folder,
        num_train_epochs=3,
        per_device_train_batch_size=4,
        learning_rate=0.1,
        use_cpu=True,
        remove_unused_columns=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = trainer_class(
        model,
        arguments,
        train_dataset=Rows(),
        compute_loss_func=lambda outputs, labels, num_items_in_batch=None: cross_entropy(outputs["logits"], labels),
    )
    return model, trainer.train().training_loss


@pytest.fixture
def replays(monkeypatch):
    """Stands in for CUDA graphs: a replay writes its results where those of the recorded call are. Lists the calls."""
    calls = []

    def record_step(step):
        loss = step()
        weights = [x for x in _parameters_of(step) if x.grad is not None]
        gradients = [x.grad for x in weights]

        def replay():
            calls.append("replay")
            loss.copy_(step())
            for x, gradient in zip(weights, gradients, strict=True):
                gradient.copy_(x.grad)
            return loss

        return replay

    monkeypatch.setattr(cuda_graphs, "record_step", record_step)
    return calls


def _parameters_of(step):
    return next(
        cell.cell_contents for cell in step.__closure__ if isinstance(cell.cell_contents, nn.Module)
    ).parameters()


def test_replays_train_as_trainer_does(tmp_path, replays):
    """Weights and loss are those of Trainer, with a last batch of another size."""
    (expected, loss), (found, replayed_loss) = (fit(x, tmp_path) for x in (Trainer, GraphTrainer))
    assert len(replays) == 6
    assert loss == pytest.approx(replayed_loss, rel=1e-6)
    for x, y in zip(expected.parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_recorded_step_follows_its_inputs():
    """A replay computes from what is in the tensors now."""
    x = torch.ones(2, device="cuda")
    replay = cuda_graphs.record_step(lambda: 3 * x)
    x.fill_(2)
    assert replay().tolist() == [6, 6]
