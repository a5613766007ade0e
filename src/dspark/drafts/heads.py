"""Markov heads (vanilla, gated, rnn) and the confidence head (DSpark paper; method sections 2 and 8)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark.drafts.config import DraftConfig


class MarkovHead(nn.Module):
    """Low-rank bias from the previous token: bias_k = W2 f(W1[x_{k-1}]).

    W1 is Embedding(V, r), W2 Linear(r, K) without bias. vanilla: f is the identity. gated:
    f = sigmoid(gate_proj([h_k ; W1[x]])) * W1[x]. rnn: z = [s ; W1[x] ; h_k], joint_proj(z) = gate, candidate, output;
    s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c); f = tanh(o); s_0 = 0.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        rank, width = config.markov_rank, config.hidden_size
        self.kind, self.rank = config.markov_head_type, rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def start(self, requests: int) -> Tensor:
        """The rnn state before slot 1: zeros [requests, r]."""
        return self.markov_w1.weight.new_zeros(requests, self.rank)

    def bias(self, hidden: Tensor, prev_ids: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One slot: hidden [..., d], previous tokens [...] -> bias [..., K] and the state for the next slot.

        state is the rnn's [R, r] (None before slot 1); the other heads hand it through.
        """
        previous = self.markov_w1(prev_ids)
        if self.kind == "gated":
            previous = torch.sigmoid(self.gate_proj(torch.cat((hidden, previous), -1))) * previous
        elif self.kind == "rnn":
            state = self.start(len(hidden)) if state is None else state
            gate, candidate, output = self.joint_proj(torch.cat((state, previous, hidden), -1)).chunk(3, -1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
            previous = torch.tanh(output)
        return self.markov_w2(previous), state

    def block_bias(self, hidden: Tensor, prev_ids: Tensor) -> Tensor:
        """Teacher-forced over whole blocks: hidden [A, n, d], prev_ids [A, n] -> bias [A, n, K]."""
        if self.kind != "rnn":
            return self.bias(hidden, prev_ids, None)[0]
        state: Tensor | None = None
        biases = []
        for slot in range(hidden.shape[1]):
            bias, state = self.bias(hidden[:, slot], prev_ids[:, slot], state)
            biases.append(bias)
        return torch.stack(biases, 1)


class ConfidenceHead(nn.Module):
    """c_k = w . [h_k ; W1[x_{k-1}]] + b, as a logit; the Markov part only when the config says so."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)

    def forward(self, hidden: Tensor, previous: Tensor | None) -> Tensor:
        """hidden [..., d], previous Markov embedding [..., r] or None -> logits [...]."""
        features = hidden if previous is None else torch.cat((hidden, previous), -1)
        return self.proj(features).squeeze(-1)
