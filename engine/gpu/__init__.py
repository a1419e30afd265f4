"""The step on a GPU.

`device`, `gpus` and `startup` can be imported anywhere; all else here needs triton.
"""
