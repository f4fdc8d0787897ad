"""Trained models for other runtimes. Each target is a module of its own, imported when it is used.

    gguf   llama.cpp: ternary weights as TQ2_0, TQ1_0 or Q2_0, 3 and 4 bits as Q4_0
"""
