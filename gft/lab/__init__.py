"""Experiments with the library, none of which `import gft` loads: what the gft command runs.

    recipe, recipes       an experiment as a typed value, and all there are
    data, models, build   data sets, networks, and the optimizer that a recipe describes
    train, runs           the training loop and its folder
    tables, report        tables of the paper with several seeds, and how they are shown
    baselines, bench      other methods on the same grid, and benchmarks against peers
    energy, hardness      the paper's energy accounting and its NP-hardness theorem
    inside                what of a quantized layer's inside is looked at
    markdown, figures, records, provenance, display      how numbers are written, drawn, kept, traced and shown
"""
