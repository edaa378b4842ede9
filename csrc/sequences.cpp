// Sequences of token ids as Python gives them: checked, sorted by length, and written one after the other. In Python
// this takes longer than the launch of a CUDA graph. Definitions in Python: fasttfm/inference/batches.py.
#include <pybind11/numpy.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "python.h"

namespace fasttfm {

namespace py = pybind11;

namespace {

// A list of Python's integers, or the elements of a one-dimensional array.
struct Ids {
  PyObject* list = nullptr;
  const char* data = nullptr;
  int64_t stride = 0;  // in bytes
  int64_t length = 0;
  bool is_signed = false;
  int bytes = 0;  // of an element
};

// Returns false for arrays whose elements are not integers in the CPU's byte order.
bool read_array(const py::array& array, Ids& ids) {
  const py::dtype type = array.dtype();
  const char kind = type.kind(), order = type.byteorder();
  if (array.ndim() != 1 || (kind != 'i' && kind != 'u') || (order != '=' && order != '|')) return false;
  ids.data = static_cast<const char*>(array.data());
  ids.stride = array.strides(0);
  ids.length = array.shape(0);
  ids.is_signed = kind == 'i';
  ids.bytes = static_cast<int>(type.itemsize());
  return true;
}

// Only of these types themselves: a subclass may have other elements than its memory.
bool read_ids(PyObject* object, Ids& ids) {
  if (PyList_CheckExact(object)) {
    ids.list = object;
    ids.length = PyList_GET_SIZE(object);
    return true;
  }
  if (Py_TYPE(object) != py::detail::npy_api::get().PyArray_Type_) return false;
  return read_array(py::reinterpret_borrow<py::array>(object), ids);
}

// The functions below write ids and return whether all are in [0, limit).

template <class Element>
bool copy_elements(const Ids& ids, int64_t limit, int64_t* target) {
  uint64_t signs = 0;  // its highest bit is set by a negative id, and by one of `limit` or more
  const auto copy = [&](int64_t stride) {
    for (int64_t i = 0; i < ids.length; ++i) {
      Element element;
      std::memcpy(&element, ids.data + i * stride, sizeof(element));
      target[i] = static_cast<int64_t>(element);
      const auto id = static_cast<uint64_t>(target[i]);
      signs |= id | (static_cast<uint64_t>(limit) - 1 - id);
    }
  };
  if (ids.stride == sizeof(Element))
    copy(sizeof(Element));  // a constant, for vector instructions
  else
    copy(ids.stride);
  return signs >> 63 == 0;
}

bool copy_list(const Ids& ids, int64_t limit, int64_t* target) {
  for (int64_t i = 0; i < ids.length; ++i) {
    PyObject* element = PyList_GET_ITEM(ids.list, i);
    if (!PyLong_CheckExact(element)) return false;
    int overflow = 0;
    target[i] = PyLong_AsLongLongAndOverflow(element, &overflow);
    if (overflow != 0 || target[i] < 0 || target[i] >= limit) return false;
  }
  return true;
}

bool copy_ids(const Ids& ids, int64_t limit, int64_t* target) {
  if (ids.list != nullptr) return copy_list(ids, limit, target);
  switch (ids.is_signed ? ids.bytes : -ids.bytes) {
    case 1: return copy_elements<int8_t>(ids, limit, target);
    case 2: return copy_elements<int16_t>(ids, limit, target);
    case 4: return copy_elements<int32_t>(ids, limit, target);
    case 8: return copy_elements<int64_t>(ids, limit, target);
    case -1: return copy_elements<uint8_t>(ids, limit, target);
    case -2: return copy_elements<uint16_t>(ids, limit, target);
    case -4: return copy_elements<uint32_t>(ids, limit, target);
    case -8: return copy_elements<uint64_t>(ids, limit, target);
    default: return false;
  }
}

// A tuple of ids int64 [T], boundaries int32 [sequences + 1], and the index int64 [sequences] of each sequence in
// `given`, longest first; sequences without ids are left out. None if one is neither a list nor an array of integers in
// [0, vocabulary), or has more than max_length.
py::object sort_ids(const py::handle& given, int64_t max_length, int64_t vocabulary) {
  const bool is_list = PyList_CheckExact(given.ptr());
  if (!is_list && !PyTuple_CheckExact(given.ptr())) return py::none();
  const int64_t count = is_list ? PyList_GET_SIZE(given.ptr()) : PyTuple_GET_SIZE(given.ptr());
  std::vector<Ids> all(count);
  std::vector<int64_t> order;
  order.reserve(count);
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    PyObject* each = is_list ? PyList_GET_ITEM(given.ptr(), i) : PyTuple_GET_ITEM(given.ptr(), i);
    if (!read_ids(each, all[i]) || all[i].length > max_length) return py::none();
    if (all[i].length > 0) order.push_back(i);
    total += all[i].length;
  }
  if (total > INT32_MAX) return py::none();
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return all[a].length > all[b].length; });

  const auto sequences = static_cast<py::ssize_t>(order.size());
  py::array_t<int64_t> ids(total), indices(sequences);
  py::array_t<int32_t> boundaries(sequences + 1);
  int64_t* target = ids.mutable_data();
  int32_t* boundary = boundaries.mutable_data();
  *boundary = 0;
  for (const int64_t index : order) {
    if (!copy_ids(all[index], vocabulary, target)) return py::none();
    target += all[index].length;
    boundary[1] = boundary[0] + static_cast<int32_t>(all[index].length);
    ++boundary;
  }
  std::copy(order.begin(), order.end(), indices.mutable_data());
  return py::make_tuple(ids, boundaries, indices);
}

// ---- buckets ---------------------------------------------------------------------------------------------------------

using Buffer = py::array_t<int32_t, py::array::c_style>;

// Writes the elements of an array to `target` and `fill` after them.
void write_padded(const py::array& array, int64_t tokens, int64_t fill, int64_t* target) {
  Ids ids;
  if (!read_array(array, ids) || ids.length > tokens)
    throw py::value_error("write_bucket: expected one-dimensional arrays of integers that fit the bucket");
  if (ids.is_signed && ids.bytes == 8 && ids.stride == 8)
    std::memcpy(target, ids.data, 8 * ids.length);
  else
    copy_ids(ids, INT64_MAX, target);
  std::fill(target + ids.length, target + tokens, fill);
}

void write_bucket(Buffer buffer, const py::array& ids, const py::object& segments, const Buffer& cu_seqlens,
                  int64_t tokens, int64_t sequences, int64_t max_seqlen, int64_t padding) {
  const bool with_segments = !segments.is_none();
  const int64_t first = (2 * tokens * (1 + with_segments) + 3) / 4 * 4, known = cu_seqlens.size();
  if (tokens < 0 || sequences < 0 || first + sequences + 1 > buffer.size() || known < 1 || known > sequences + 1)
    throw py::value_error("write_bucket: expected a buffer for the bucket, and a batch that fits it");
  int32_t* target = buffer.mutable_data();
  write_padded(ids, tokens, padding, reinterpret_cast<int64_t*>(target));
  if (with_segments) write_padded(segments, tokens, 0, reinterpret_cast<int64_t*>(target) + tokens);
  int32_t* boundaries = target + first;
  std::copy_n(cu_seqlens.data(), known, boundaries);
  int64_t boundary = ids.shape(0);
  for (int64_t i = known; i <= sequences; ++i) {
    boundary = std::min(boundary + max_seqlen, tokens);
    boundaries[i] = static_cast<int32_t>(boundary);
  }
}

}  // namespace

void bind_sequences(py::module_& python) {
  python.def("sort_ids", &sort_ids, py::arg("given"), py::arg("max_length"), py::arg("vocabulary"));
  python.def("write_bucket", &write_bucket, py::arg("buffer").noconvert(), py::arg("ids"), py::arg("segments"),
             py::arg("cu_seqlens").noconvert(), py::arg("tokens"), py::arg("sequences"), py::arg("max_seqlen"),
             py::arg("padding"));
}

}  // namespace fasttfm
