"""GPU kernels, each a PyTorch operator in the namespace `tacit::`.

A kernel that is launched directly is invisible to a tracer: what it wrote during the trace would
become a constant of the recording, and every replay would add the first batch's gradients. An
operator with a fake implementation is recorded as a call. The operators mutate nothing, and no
output shares memory with an input. Callers ask `fits(...)`, which looks at device, dtype and shape
and never at values.
"""
