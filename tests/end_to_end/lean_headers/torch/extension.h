// The part of PyTorch's <torch/extension.h> that DeepSpeed's operator for CPUs (shm_comm, 0.19) uses: with the folder of
// this file in CPATH its two files are compiled in a third of the time.
#pragma once
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <pybind11/pybind11.h>
#include <torch/library.h>

namespace torch {
using namespace at;
}
