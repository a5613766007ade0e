"""A first Markov head from counts: which token follows which in the answers, more often than it would anyway.

The bias of the Markov head is a matrix over (previous token a, next token b) of rank r. Its start is the log-odds
log p(b | a) - log p(b), the pointwise mutual information of word association norms (Church and Hanks 1990), whose
low-rank factorisation is what skip-gram embeddings learn (Levy and Goldberg 2014). p(b | a) is shrunk to p(b) by S
pseudo-counts (a Dirichlet prior, as in MacKay and Peto 1995):

    p(b | a) = (C_ab + S p(b)) / (n_a + S)   ->   log p(b | a) / p(b) = log(1 + C_ab / (S p(b))) + terms of a alone

Terms of a alone shift all logits of a slot and change no probability: what is left is zero wherever C_ab is, so sparse.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy.sparse import coo_matrix, csr_matrix, diags
from scipy.sparse.linalg import svds
from torch import Tensor

from dspark.data.rows import Row
from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError

PSEUDO_COUNTS = 100.0
DENSE = 512  # below this many rows or columns all singular values are computed: ARPACK restarts at random on few


def bigram_log_odds(rows: Sequence[Row], draft_ids: Sequence[int], vocab_size: int) -> tuple[csr_matrix, np.ndarray]:
    """(shrunken log-odds [V, K], float64, >= 0; how often each id of V comes before a draft id [V]).

    Bigrams inside the answers, whose second token is one of the K draft ids.
    """
    place = np.full(vocab_size, -1)
    place[np.asarray(draft_ids)] = np.arange(len(draft_ids))
    before = np.concatenate([np.asarray(row.answer_ids[:-1], dtype=np.int64) for row in rows])
    after = place[np.concatenate([np.asarray(row.answer_ids[1:], dtype=np.int64) for row in rows])]
    before, after = before[after >= 0], after[after >= 0]
    if not len(before):
        raise DsparkError("training.markov_init", "bigram", "the answers hold no pair of draft tokens; give more")
    counts = coo_matrix((np.ones(len(before)), (before, after)), shape=(vocab_size, len(draft_ids))).tocsr()
    share = np.bincount(after, minlength=len(draft_ids)) / len(after)
    odds = counts.tocoo()
    odds.data = np.log1p(odds.data / (PSEUDO_COUNTS * share[odds.col]))
    return odds.tocsr(), np.asarray(counts.sum(axis=1)).ravel()


def factorise(odds: csr_matrix, weights: np.ndarray, rank: int) -> tuple[Tensor, Tensor]:
    """W1 [V, r] and W2 [K, r], float32, with W1 W2^T close to `odds` [V, K] where the row weights [V] are large.

    W2 spans the r leading right singular directions of sqrt(weights) odds, W1 is each row's projection on them: a rare
    row cannot grow beyond its own odds. The columns of both have the same norm. Columns past the matrix's rank are 0.
    """
    rows, columns = np.flatnonzero(np.diff(odds.indptr)), np.unique(odds.indices)  # the others are zero
    seen = (diags(np.sqrt(weights)) @ odds)[rows][:, columns]
    if min(seen.shape) <= max(DENSE, rank):
        _, values, part = np.linalg.svd(seen.toarray(), full_matrices=False)
        values, part = values[:rank], part[:rank]
    else:
        start = np.ones(min(seen.shape))  # a fixed start of the iteration: the same rows give the same weights
        _, values, part = svds(seen, k=rank, v0=start)
        values, part = values[::-1], part[::-1]
    right = np.zeros((odds.shape[1], len(values)))  # [K, <= r], leading direction first
    right[columns] = part.T
    right = right[:, values > 1e-9 * values.max()]
    left = odds @ right
    scale = np.sqrt(np.linalg.norm(left, axis=0))
    w1, w2 = np.zeros((odds.shape[0], rank)), np.zeros((odds.shape[1], rank))
    w1[:, : len(scale)], w2[:, : len(scale)] = left / scale, right * scale
    return torch.from_numpy(w1).float(), torch.from_numpy(w2).float()


@torch.no_grad()
def start_from_bigrams(draft: DSparkDraft, rows: Sequence[Row]) -> str:
    """Set the vanilla Markov head: W2 W1[a] approximates the log-odds of what follows a. Returns a line to say.

    Rows of tokens without a bigram are zero. Raises DsparkError when the answers hold none at all.
    """
    head = draft.markov_head
    if head is None or head.kind != "vanilla":
        raise DsparkError("training.markov_init", "bigram", "needs a draft with a vanilla Markov head")
    odds, weights = bigram_log_odds(rows, draft.draft_ids.tolist(), draft.config.vocab_size)
    w1, w2 = factorise(odds, weights, head.rank)
    head.markov_w1.weight.copy_(w1)
    head.markov_w2.weight.copy_(w2)
    return (
        f"Markov head from {int(weights.sum()):,} bigrams ({odds.nnz:,} different, {int((weights > 0).sum()):,} first "
        f"tokens), rank {head.rank}"
    )
