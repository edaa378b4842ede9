// Sequences of token ids as Python gives them: checked, sorted by length, and written one after the other. In Python
// this takes longer than the launch of a CUDA graph. Definitions in Python: fasttfm/inference/batches.py.
#include <pybind11/numpy.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
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

// Accepts only these types themselves: a subclass may have other elements than its memory.
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

// Returns -1 for an integer that does not fit 64 bits.
int64_t value_of(PyObject* integer) {
#if PY_VERSION_HEX >= 0x030C0000  // inline functions
  const auto* small = reinterpret_cast<const PyLongObject*>(integer);
  if (PyUnstable_Long_IsCompact(small)) return PyUnstable_Long_CompactValue(small);
#endif
  int overflow = 0;
  return PyLong_AsLongLongAndOverflow(integer, &overflow);
}

bool copy_list(const Ids& ids, int64_t limit, int64_t* target) {
  for (int64_t i = 0; i < ids.length; ++i) {
    PyObject* element = PyList_GET_ITEM(ids.list, i);
    if (!PyLong_CheckExact(element)) return false;
    target[i] = value_of(element);
    if (target[i] < 0 || target[i] >= limit) return false;
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

// ---- buckets ---------------------------------------------------------------------------------------------------------

using Buffer = py::array_t<int32_t, py::array::c_style>;

// The layout of a bucket in an array of int32: ids int64 [tokens], segments int64 [tokens] if there are any, and
// boundaries int32 [sequences + 1], at a multiple of 16 bytes. Definition in Python: split_buffer.
struct BucketArrays {
  BucketArrays(Buffer& buffer, int64_t tokens, int64_t sequences, bool with_segments, int64_t known)
      : tokens(tokens), sequences(sequences) {
    const int64_t first = (2 * tokens * (1 + with_segments) + 3) / 4 * 4;
    if (tokens < 0 || sequences < known || first + sequences + 1 > buffer.size())
      throw py::value_error("write_bucket: expected a buffer for the bucket, and a batch that fits it");
    int32_t* target = buffer.mutable_data();
    ids = reinterpret_cast<int64_t*>(target);
    segments = ids + tokens;
    boundaries = target + first;
  }

  // Writes the boundaries after those of `known` sequences: those of padding tokens, and of empty sequences.
  void fill_boundaries(int64_t known, int64_t max_seqlen) {
    int64_t boundary = boundaries[known];
    for (int64_t i = known + 1; i <= sequences; ++i) {
      boundary = std::min(boundary + max_seqlen, tokens);
      boundaries[i] = static_cast<int32_t>(boundary);
    }
  }

  int64_t tokens, sequences;
  int64_t *ids, *segments;
  int32_t* boundaries;
};

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
  const int64_t known = cu_seqlens.size() - 1;
  if (known < 0) throw py::value_error("write_bucket: expected boundaries, got none");
  BucketArrays bucket(buffer, tokens, sequences, !segments.is_none(), known);
  write_padded(ids, tokens, padding, bucket.ids);
  if (!segments.is_none()) write_padded(segments, tokens, 0, bucket.segments);
  std::copy_n(cu_seqlens.data(), known + 1, bucket.boundaries);
  bucket.fill_boundaries(known, max_seqlen);
}

// ---- sequences -------------------------------------------------------------------------------------------------------

// Sequences of ids in the order of their lengths, longest first; those of the same length keep the order of the inputs,
// and those without ids are left out. The ids are read when they are written.
class Sequences {
 public:
  // Returns None if an input is neither a list nor an array of integers, or has more than max_length ids.
  static py::object of(const py::handle& inputs, int64_t max_length) {
    const bool is_list = PyList_CheckExact(inputs.ptr());
    if (!is_list && !PyTuple_CheckExact(inputs.ptr())) return py::none();
    auto sequences = std::make_unique<Sequences>();
    sequences->input_count_ = is_list ? PyList_GET_SIZE(inputs.ptr()) : PyTuple_GET_SIZE(inputs.ptr());
    sequences->all_.reserve(sequences->input_count_);
    for (int64_t i = 0; i < sequences->input_count_; ++i) {
      PyObject* ids_object = is_list ? PyList_GET_ITEM(inputs.ptr(), i) : PyTuple_GET_ITEM(inputs.ptr(), i);
      Ids ids;
      if (!read_ids(ids_object, ids) || ids.length > max_length) return py::none();
      sequences->tokens_ += ids.length;
      if (ids.length > 0) sequences->all_.push_back({py::reinterpret_borrow<py::object>(ids_object), ids.length, i});
    }
    if (sequences->tokens_ > INT32_MAX) return py::none();
    std::stable_sort(sequences->all_.begin(), sequences->all_.end(),
                     [](const auto& a, const auto& b) { return a.length > b.length; });
    return py::cast(std::move(sequences));
  }

  // The numbers of ids and of sequences, and the length of the longest one.
  py::tuple sizes() const { return py::make_tuple(tokens_, count(), all_.empty() ? 0 : all_.front().length); }

  // Writes all sequences and padding. Returns false if an id is not in [0, vocabulary).
  bool write(Buffer& buffer, int64_t tokens, int64_t sequences, int64_t max_seqlen, int64_t vocabulary,
             int64_t padding) const {
    BucketArrays bucket(buffer, tokens, sequences, false, count());
    if (tokens_ > tokens) throw py::value_error("write_bucket: expected a bucket for all ids");
    if (!copy(vocabulary, bucket.ids, bucket.boundaries)) return false;
    std::fill(bucket.ids + tokens_, bucket.ids + tokens, padding);
    bucket.fill_boundaries(count(), max_seqlen);
    return true;
  }

  // Writes sequences into the bucket that `known`, a dictionary from sizes() to tuples of a bucket's three numbers and
  // an object, has for them. Returns a tuple of the sequences, that object and sizes(); the object is None, and nothing
  // is written, if there is no such bucket. Returns None as of() does, and if an id is not in [0, vocabulary).
  static py::object stage(const py::handle& inputs, const py::dict& known, Buffer buffer, int64_t max_length,
                          int64_t vocabulary, int64_t padding) {
    py::object staged = of(inputs, max_length);
    if (staged.is_none()) return staged;
    const auto& sequences = *staged.cast<const Sequences*>();
    const py::tuple sizes = sequences.sizes();
    PyObject* bucket = PyDict_GetItemWithError(known.ptr(), sizes.ptr());
    if (bucket == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    if (bucket == nullptr) return py::make_tuple(staged, py::none(), sizes);
    const auto numbers = py::reinterpret_borrow<py::tuple>(bucket);
    const auto number = [&](size_t i) { return numbers[i].cast<int64_t>(); };
    if (!sequences.write(buffer, number(0), number(1), number(2), vocabulary, padding)) return py::none();
    return py::make_tuple(staged, numbers[3], sizes);
  }

  // Returns a tuple of ids int64 [T], boundaries int32 [count + 1], and the index int64 [count] of each sequence among
  // the inputs, or None if an id is not in [0, vocabulary).
  py::object sorted(int64_t vocabulary) const {
    py::array_t<int64_t> ids(tokens_), order(count());
    py::array_t<int32_t> boundaries(count() + 1);
    if (!copy(vocabulary, ids.mutable_data(), boundaries.mutable_data())) return py::none();
    int64_t* index = order.mutable_data();
    for (const Sequence& sequence : all_) *index++ = sequence.index;
    return py::make_tuple(ids, boundaries, order);
  }

  // Returns rows of `width` elements, one for each sequence and maybe more, in the order of the inputs: fp32 [inputs,
  // width]. Sequences without ids have zeros.
  py::array_t<float> in_given_order(const py::array_t<float, py::array::c_style>& rows, int64_t width) const {
    if (width < 0 || rows.size() < count() * width)
      throw py::value_error("in_given_order: expected a row for each sequence");
    py::array_t<float> result({input_count_, width});
    float* target = result.mutable_data();
    if (count() < input_count_) std::fill_n(target, input_count_ * width, 0.0f);
    const float* row = rows.data();
    for (const Sequence& sequence : all_) {
      std::memcpy(target + sequence.index * width, row, width * sizeof(float));
      row += width;
    }
    return result;
  }

 private:
  int64_t count() const { return static_cast<int64_t>(all_.size()); }

  struct Sequence {
    py::object ids;
    int64_t length;
    int64_t index;  // among the inputs
  };

  bool copy(int64_t vocabulary, int64_t* target, int32_t* boundary) const {
    *boundary = 0;
    for (const Sequence& sequence : all_) {
      Ids ids;
      if (!read_ids(sequence.ids.ptr(), ids) || ids.length != sequence.length)  // another thread has changed it
        throw py::value_error("Session: inputs: expected lists that do not change during a call");
      if (!copy_ids(ids, vocabulary, target)) return false;
      target += sequence.length;
      boundary[1] = boundary[0] + static_cast<int32_t>(sequence.length);
      ++boundary;
    }
    return true;
  }

  std::vector<Sequence> all_;
  int64_t tokens_ = 0, input_count_ = 0;
};

}  // namespace

void bind_sequences(py::module_& python) {
  py::class_<Sequences>(python, "Sequences")
      .def_static("of", &Sequences::of, py::arg("given"), py::arg("max_length"))
      .def("sizes", &Sequences::sizes)
      .def("write", &Sequences::write, py::arg("buffer").noconvert(), py::arg("tokens"), py::arg("sequences"),
           py::arg("max_seqlen"), py::arg("vocabulary"), py::arg("padding"))
      .def_static("stage", &Sequences::stage, py::arg("given"), py::arg("known"), py::arg("buffer").noconvert(),
                  py::arg("max_length"), py::arg("vocabulary"), py::arg("padding"))
      .def("sorted", &Sequences::sorted, py::arg("vocabulary"))
      .def("in_given_order", &Sequences::in_given_order, py::arg("rows").noconvert(), py::arg("width"));
  python.def("write_bucket", &write_bucket, py::arg("buffer").noconvert(), py::arg("ids"), py::arg("segments"),
             py::arg("cu_seqlens").noconvert(), py::arg("tokens"), py::arg("sequences"), py::arg("max_seqlen"),
             py::arg("padding"));
}

}  // namespace fasttfm
