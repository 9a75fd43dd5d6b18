"""What the fallback sees, and when it acts."""

from __future__ import annotations

from mutation import Mutation

FALLBACK = (
    Mutation(
        16,
        "samples share no period with a fault",
        "    return block * every + drawn % every + 1\n",
        "    return block * every + every\n",
        "tests/unit/precision/test_sampled_faults.py",
    ),
    Mutation(
        16,
        "evidence weighs how far over, not only how often",
        "1 + _PER_OCTAVE * octaves",
        "1",
        "tests/unit/monitors/test_fallback.py -k ever_so_often",
    ),
    Mutation(
        16,
        "one or two overflows, however large, are no fault",
        " & (self.bad >= self._hits)",
        "",
        "tests/unit/monitors/test_fallback.py -k few_overflows",
    ),
    Mutation(
        16,
        "one that leaves long after its return does not stay away for longer",
        "self._stays[index] = stays if again else 1",
        "self._stays[index] = stays",
        "tests/unit/monitors/test_fallback.py -k leaves_again_soon",
    ),
    Mutation(
        16,
        "a healthy fast start keeps its layers",
        "limits[_SATURATION] *= headroom",
        "pass",
        "tests/unit/monitors/test_fast_starts.py -k keeps_its_layers",
    ),
    Mutation(
        16,
        "what a growing tensor clips is no fault",
        "grown = (headroom > 1) & (values[_SATURATION] <= headroom)",
        "grown = headroom > 99",
        "tests/unit/monitors/test_fast_starts.py -k over_the_edge",
    ),
    Mutation(
        16,
        "growth hides no fault",
        "0.0, np.log2(_MOST)",
        "0.0, 99.0",
        "tests/unit/monitors/test_fast_starts.py -k taken_for_growth",
    ),
    Mutation(
        16,
        "an outlier does not hide what it does to the rest",
        "own.sum(),",
        "error.square().sum() / exact.square().sum(),",
        "tests/unit/precision/test_hidden_values.py",
    ),
    Mutation(
        16,
        "the kernel counts each value beside itself, too",
        "  stats[5] += s.own;",
        "",
        "tests/unit/precision/test_scaling.py -k kernel_statistics",
    ),
    Mutation(
        16,
        "gradients have a limit of underflow of their own",
        "default=0.85, gt=0, le=1",
        "default=0.2, gt=0, le=1",
        "tests/unit/monitors/test_evidence.py",
    ),
    Mutation(
        16,
        "a layer that is dead behind another does not wait for its turn",
        "            over = over | self._evidence.lost()\n",
        "            pass\n",
        "tests/unit/monitors/test_evidence.py -k hidden_behind",
    ),
    Mutation(
        16,
        "what every step measures says when to measure more",
        " or self._odd[among].any())",
        ")",
        "tests/unit/precision/test_sampled_faults.py -k every_carrier",
    ),
    Mutation(
        16,
        "a fault that is there from the start waits for no sample",
        "return replace(quiet, sample_steps=self.policy.hits)",
        "return quiet",
        "tests/unit/monitors/test_evidence.py -k first_steps_are",
    ),
    Mutation(
        16,
        "when a layer left last is part of the state",
        '        "left_at",\n',
        "",
        "tests/unit/monitors/test_evidence.py -k hidden_behind",
    ),
    Mutation(
        16,
        "how long the next stay is goes through a resume",
        '        "stays",\n',
        "",
        "tests/unit/monitors/test_same_decisions.py",
    ),
    Mutation(
        16,
        "the score of sparse overflows is part of the state",
        '            self._score.restore(_array(meta["score"]), _array(meta["bad"]))\n',
        "            pass\n",
        "tests/unit/monitors/test_fallback.py -k mid_trace",
    ),
    Mutation(
        16,
        "that a tensor vanished is known without a sample",
        "np.where(vanished, np.float32(1), values[_UNDERFLOW])",
        "values[_UNDERFLOW]",
        "tests/unit/precision/test_sampled_faults.py -k vanishes",
    ),
    Mutation(
        16,
        "a guard that takes the fallback with it says so",
        "if guard or not (fallback and in_fp8):",
        "if True:",
        "tests/unit/precision/test_own_guard.py -k fallback_with_it",
    ),
)
