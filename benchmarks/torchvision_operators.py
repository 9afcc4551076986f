"""Import torchvision beside a CPU build of PyTorch.

Its wheel is built for CUDA. Beside a CPU build its compiled part does not load, and the import
stops at operators that are missing. No model here calls them, so a declaration is enough.
"""

import torch

if not torch.cuda.is_available() and not hasattr(torch.ops.torchvision, "nms"):
    # Alive as long as the process: a library that is collected takes its operators with it.
    LIBRARY = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
