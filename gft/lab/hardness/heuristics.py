"""Ways to look for separating weights without a proof: GFT itself, a perceptron that is rounded, a local search, guessing.

Each takes a separability problem, seconds of CPU time and a seed, and returns an Answer. None can say "no": when the time
is up without a find, the answer is unknown. What they find is verified before it is returned. GFT and the perceptron run
many tries side by side, a row each, since one try of a small problem is all overhead.
"""

import time
from collections.abc import Callable

import numpy as np
import torch

import gft
from gft.errors import UsageError
from gft.lab.hardness.reduction import SIGNS, Separability, levels_up_to
from gft.lab.hardness.solvers import Answer

TRIES = 64  # side by side


def find_by_gft(problem: Separability, seconds: float, seed: int = 0, *, k: float = 0.3,
                steps_a_start: int = 2000) -> Answer:
    """Train one gft.QuantLinear, a try a row, with gft.GFT on the hinge loss max(0, 1 - y · (x · w)) over all points.

    ±1 weights are not a grid of GFT's, its smallest is -1, 0, 1. There a level 0 is read as 1, and the loss is taken at
    that reading: what it changes is added to the output as a constant, so delta, and with it the votes, belong to the ±1
    weights. The zero is then a step of hesitation between 1 and -1.

    k: fraction of weights that may move a step (rule "topk"). At 0 none moves; near 1 a good weight is lost as fast as a bad
        one is mended. It stays constant: this is a search for one exact hit, not training that has to settle.
    steps_a_start: steps until all rows begin anew from another random start. Small: more starts, none searched far.
    """
    start = time.process_time()
    as_signs = problem.levels == SIGNS
    bits = 2 if as_signs else bits_of(problem.levels)
    signed = torch.from_numpy(problem.signed()).float()  # (points, columns); the margins of w are signed @ w
    starts = 0
    while not out_of_time(start, seconds, starts):
        own_seed = 2**20 * seed + starts
        starts += 1
        with torch.random.fork_rng(devices=[]):  # the layer draws its start from torch's generator, which is the caller's
            torch.manual_seed(own_seed)
            layer = gft.QuantLinear(problem.columns, TRIES, bits=bits)
        layer.scale.fill_(1.0)  # outputs are margins, not activations
        optimizer = gft.GFT(gft.quantized(layer), lr=k, rule=gft.TopK(), seed=own_seed)
        for step in range(steps_a_start):
            levels = layer.levels().float()
            weights = torch.where(levels >= 0, 1.0, -1.0) if as_signs else levels
            separates = (signed @ weights.T > 0).all(0)
            if separates.any():
                return verified(problem, weights[int(separates.int().argmax())].numpy(), start)
            if out_of_time(start, seconds, step):
                break
            margins = layer(signed)
            if as_signs:
                margins = margins + signed @ (weights - levels).T
            optimizer.zero_grad()
            torch.relu(1 - margins).sum().backward()
            optimizer.step()
    return Answer(None, False, time.process_time() - start)


def find_by_perceptron(problem: Separability, seconds: float, seed: int = 0, *, spread: float = 3.0,
                       steps_a_start: int = 2000) -> Answer:
    """Rosenblatt's perceptron in floats, rounded: to the sign for ±1, to the nearest level for -I..I.

    Every step each try adds a random point it does not separate by a margin of 1; a try that separates all points starts
    anew. The rounding of every step is tested, not only that of the last, so the perceptron gets more chances than
    "train, then round" would give it.

    spread: standard deviation of the random start. At 0 all tries begin alike and end after a few steps at
        float weights near (0, ..., 0, 1), whose signs are noise; the larger, the more steps a try lasts.
    """
    start = time.process_time()
    generator = np.random.default_rng(seed)
    signed = problem.signed().astype(np.float32)
    weights = generator.normal(0, spread, (TRIES, problem.columns)).astype(np.float32)
    age = np.zeros(TRIES, dtype=int)
    step = 0
    while not out_of_time(start, seconds, step):
        candidates = rounded(weights, problem.levels)
        separates = (candidates @ signed.T > 0).all(1)
        if separates.any():
            return verified(problem, candidates[int(separates.argmax())], start)
        wrong = weights @ signed.T < 1  # (tries, points)
        # The largest of random numbers among the wrong points: a uniform choice, one a row.
        chosen = (generator.random(wrong.shape, dtype=np.float32) * wrong).argmax(1)
        learning = np.any(wrong, axis=1)
        weights[learning] += signed[chosen[learning]]
        age += 1
        over = ~learning | (age >= steps_a_start)
        weights[over] = generator.normal(0, spread, (int(over.sum()), problem.columns))
        age[over] = 0
        step += 1
    return Answer(None, False, time.process_time() - start)


def find_by_local_search(problem: Separability, seconds: float, seed: int = 0, *, noise: float = 0.5) -> Answer:
    """WalkSAT in the words of the data: take a point that is not separated and move one of its weights one level its way.

    A weight whose move leaves no other point behind is taken at once; else, with chance `noise`, any of them, else the
    one that leaves the fewest behind. On the reduction of a formula with ±1 weights this is WalkSAT itself.

    noise: At 0 it is greedy and soon runs in circles; at 1 it is a random walk.
    """
    start = time.process_time()
    generator = np.random.default_rng(seed)
    signed = problem.signed()
    if not signed.any(1).all():  # a point at 0 is never separated
        return Answer(None, False, time.process_time() - start)
    levels = np.array(problem.levels)
    places = generator.integers(0, len(levels), problem.columns)  # of each weight in levels
    points_of = [np.flatnonzero(column) for column in signed.T]
    entries_of = [column[points] for column, points in zip(signed.T, points_of, strict=True)]
    columns_of = [np.flatnonzero(row) for row in signed]
    margins = signed @ levels[places]
    step = 0
    while not out_of_time(start, seconds, step):
        step += 1
        wrong = np.flatnonzero(margins <= 0)
        if not len(wrong):
            return verified(problem, levels[places], start)
        point = wrong[generator.integers(len(wrong))]
        moves = []  # (points left behind, column, place to go to, new margins of the column's points)
        for column in columns_of[point]:
            place = places[column] + (1 if signed[point, column] > 0 else -1)
            if 0 <= place < len(levels):
                before = margins[points_of[column]]
                after = before + (levels[place] - levels[places[column]]) * entries_of[column]
                moves.append((int(((before > 0) & (after <= 0)).sum()), int(column), int(place), after))
        if not moves:  # every weight of the point is at its edge already: only moves on other points can help
            continue
        least = min(left_behind for left_behind, *_ in moves)
        if least == 0 or generator.random() >= noise:
            moves = [move for move in moves if move[0] == least]
        _, column, place, after = moves[generator.integers(len(moves))]
        places[column] = place
        margins[points_of[column]] = after
    return Answer(None, False, time.process_time() - start)


def find_by_guessing(problem: Separability, seconds: float, seed: int = 0) -> Answer:
    """Draw weights at random until some separate. What any search has to beat."""
    start = time.process_time()
    generator = np.random.default_rng(seed)
    signed = problem.signed().astype(np.float32)
    levels = np.array(problem.levels, dtype=np.float32)
    step = 0
    while not out_of_time(start, seconds, step):
        guesses = levels[generator.integers(0, len(levels), (TRIES, problem.columns))]
        separates = (guesses @ signed.T > 0).all(1)
        if separates.any():
            return verified(problem, guesses[int(separates.argmax())], start)
        step += 1
    return Answer(None, False, time.process_time() - start)


HEURISTICS: dict[str, Callable[[Separability, float, int], Answer]] = {
    "gft": find_by_gft, "perceptron": find_by_perceptron, "local-search": find_by_local_search,
    "guessing": find_by_guessing}


def rounded(weights: np.ndarray, levels: tuple[int, ...]) -> np.ndarray:
    """Float weights -> allowed ones, a row at a time: the sign, or the nearest level once the largest |w| is scaled to I."""
    if levels == SIGNS:
        return np.where(weights >= 0, 1, -1).astype(np.float32)
    largest = np.abs(weights).max(1, keepdims=True)
    return np.rint(weights / np.where(largest > 0, largest, 1) * levels[-1]).astype(np.float32)


def bits_of(levels: tuple[int, ...]) -> int:
    """2 for -1..1, 3 for -3..3, and so on: GFT's grids."""
    for bits in range(2, 9):
        if levels == levels_up_to(2 ** (bits - 1) - 1):
            return bits
    raise UsageError(f"GFT has no grid {levels[0]}..{levels[-1]}; its grids are -I..I with I = 1, 3, 7, 15, 31, 63 or 127")


def out_of_time(start: float, seconds: float, steps_done: int) -> bool:
    """Never before the first step: however short the time, every search tries something."""
    return steps_done > 0 and time.process_time() - start >= seconds


def verified(problem: Separability, weights: np.ndarray, start: float) -> Answer:
    weights = np.asarray(weights, dtype=np.int64)
    assert problem.separated_by(weights), "a heuristic claimed weights that do not separate the data"
    return Answer(weights, True, time.process_time() - start)
