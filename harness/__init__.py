"""FP8 training harness: one recipe that degrades by capability, scales you can watch, runs that survive."""
