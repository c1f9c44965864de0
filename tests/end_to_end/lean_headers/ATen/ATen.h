// For <torch/extension.h> beside this: without the thousands of functions that PyTorch's own file declares.
#pragma once
#include <ATen/core/Tensor.h>
