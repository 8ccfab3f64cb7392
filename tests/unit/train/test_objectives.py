"""The losses at chosen positions, and that packed sequences are blind to each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from dschat_core.errors import ConfigError
from dschat_core.model_folder import check_reward_folder, context_length, tensor_names, vocab_size
from dschat_core.train.objectives import AtPositions, bradley_terry_loss, next_token_loss, pack_last, pack_targets
from dschat_core.train.reward_model import RewardModel, save_normalisation

CPU = torch.device("cpu")
EOS = 3


def tiny_config(**more: object) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        **more,
    )


@pytest.fixture
def policy() -> AtPositions:
    torch.manual_seed(0)
    return AtPositions(LlamaForCausalLM(tiny_config()))


@pytest.fixture
def scorer() -> AtPositions:
    torch.manual_seed(0)
    return AtPositions(LlamaForSequenceClassification(tiny_config(num_labels=1, pad_token_id=EOS)))


def samples(*lengths: int) -> list[tuple[np.ndarray, np.ndarray]]:
    draw = np.random.default_rng(0)
    found = []
    for length in lengths:
        mask = draw.random(length) < 0.6
        mask[0], mask[-1] = False, True
        found.append((draw.integers(4, 50, length), mask))
    return found


def gradients(model: torch.nn.Module) -> torch.Tensor:
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return flat


def test_loss_at_positions_is_the_loss_of_the_whole_forward(policy: AtPositions) -> None:
    ((ids, mask),) = samples(20)
    inputs = pack_targets([[(ids, mask)]], device=CPU)
    logits = policy.model(torch.from_numpy(ids)[None]).logits[0, :-1]
    nats = torch.nn.functional.cross_entropy(logits, torch.from_numpy(ids)[1:], reduction="none")
    expected = nats[torch.from_numpy(mask)[1:]].sum()
    torch.testing.assert_close(next_token_loss(policy(inputs), inputs.targets_N), expected)


def test_packed_rows_never_leak(policy: AtPositions) -> None:
    """loss(packed) is the sum of the separate losses, and so are its gradients."""
    a, b, c, d = samples(9, 14, 5, 17)
    inputs = pack_targets([[a, b, c], [d]], device=CPU)
    packed = next_token_loss(policy(inputs), inputs.targets_N)
    packed.backward()
    packed_gradient = gradients(policy)
    total = torch.zeros(())
    for sample in (a, b, c, d):
        alone = pack_targets([[sample]], device=CPU)
        assert alone.attention_mask_B1TT is None
        loss = next_token_loss(policy(alone), alone.targets_N)
        loss.backward()
        total += loss.detach()
    torch.testing.assert_close(packed.detach(), total)
    torch.testing.assert_close(packed_gradient, gradients(policy), rtol=1e-4, atol=1e-6)


def test_a_neighbour_in_the_row_changes_nothing(policy: AtPositions) -> None:
    a, b, other = samples(9, 14, 14)
    first, second = (pack_targets([[a, neighbour]], device=CPU) for neighbour in (b, other))
    count = int(a[1][1:].sum())
    assert not torch.equal(first.input_ids_BT, second.input_ids_BT)
    torch.testing.assert_close(policy(first)[:count], policy(second)[:count])


def test_d9_the_first_answer_token_carries_loss() -> None:
    ids, mask = np.array([10, 11, 20, 21]), np.array([False, False, True, True])
    inputs = pack_targets([[(ids, mask)]], device=CPU)
    assert inputs.targets_N.tolist() == [20, 21]
    assert inputs.positions_N.tolist() == [1, 2]


def test_d10_a_batch_without_a_target_weighs_nothing(policy: AtPositions) -> None:
    ids, mask = samples(6)[0]
    for rows in ([[(ids, np.zeros_like(mask))]], []):
        inputs = pack_targets(rows, device=CPU)
        loss = next_token_loss(policy(inputs), inputs.targets_N)
        loss.backward()
        assert loss.item() == 0.0
        assert torch.equal(gradients(policy), torch.zeros(1).expand_as(gradients_like(policy)))


def gradients_like(model: torch.nn.Module) -> torch.Tensor:
    return torch.zeros(sum(p.numel() for p in model.parameters()))


def test_d7_an_eos_that_doubles_as_padding_keeps_its_label(policy: AtPositions) -> None:
    ids, mask = np.array([10, 11, EOS]), np.array([False, True, True])
    longer = samples(8)[0]
    inputs = pack_targets([[(ids, mask)], [longer]], device=CPU)
    assert inputs.targets_N.tolist()[:2] == [11, EOS]


def test_bradley_terry() -> None:
    chosen, rejected = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0])
    expected = np.log1p(np.exp(-1.0)) + np.log(2.0)
    assert bradley_terry_loss(chosen, rejected).item() == pytest.approx(expected, rel=1e-6)


def test_m3_m4_scores_alone_packed_and_padded(scorer: AtPositions) -> None:
    """An eos inside the prompt, or as padding, changes no score; nor do neighbours and padding on either side."""
    draw = np.random.default_rng(1)
    sequences = [draw.integers(4, 50, length) for length in (7, 12, 3, 9)]
    sequences[1][4] = EOS
    sequences[0][-1] = EOS
    alone = torch.stack([scorer.model(torch.from_numpy(ids)[None]).logits[0, 0] for ids in sequences[1:]])
    scores = scorer(pack_last(sequences, device=CPU)).squeeze(-1)
    torch.testing.assert_close(scores[1:], alone, rtol=1e-5, atol=1e-5)
    reward = RewardModel(scorer.model)
    for side in ("right", "left"):
        ids_BT = torch.full((4, 15), EOS)
        mask_BT = torch.zeros(4, 15, dtype=torch.long)
        for row, ids in enumerate(sequences):
            place = slice(0, len(ids)) if side == "right" else slice(15 - len(ids), 15)
            ids_BT[row, place], mask_BT[row, place] = torch.from_numpy(ids), 1
        torch.testing.assert_close(reward.score(ids_BT, mask_BT), scores.detach(), rtol=1e-5, atol=1e-5)


def test_m7_a_reward_folder_without_its_head_is_refused(tmp_path: Path, scorer: AtPositions) -> None:
    causal, whole = tmp_path / "causal", tmp_path / "whole"
    LlamaForCausalLM(tiny_config()).save_pretrained(causal)
    scorer.model.save_pretrained(whole)
    with pytest.raises(ConfigError, match=r"no scalar head"):
        check_reward_folder(causal)
    with pytest.raises(ConfigError, match=r"no scalar head"):
        RewardModel.load(causal)
    check_reward_folder(whole)
    assert (context_length(whole), vocab_size(whole)) == (64, 50)
    assert "score.weight" in tensor_names(whole)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"config.json"):
        check_reward_folder(tmp_path / "empty")


def test_reward_normalisation_is_applied(tmp_path: Path, scorer: AtPositions) -> None:
    scorer.model.save_pretrained(tmp_path)
    ids, mask = torch.randint(4, 50, (3, 6)), torch.ones(3, 6)
    raw = RewardModel.load(tmp_path).score(ids, mask)
    save_normalisation(tmp_path, 0.5, 2.0)
    torch.testing.assert_close(RewardModel.load(tmp_path).score(ids, mask), (raw - 0.5) / 2.0)
    save_normalisation(tmp_path, 0.5, 0.0)
    with pytest.raises(ConfigError, match="normalisation"):
        RewardModel.load(tmp_path)
