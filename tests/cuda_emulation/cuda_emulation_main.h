// The program around the emulated kernels: `emulator.py` puts this after the kernel text and the
// definition of `kernels`. As an executable it reads one launch from standard input and writes the
// buffers back to standard output; as a shared library it offers `cuda_emulation_launch`.
#pragma once

namespace cuda_emulation {

inline const Kernel *find_kernel(const char *name) {
  for (const Kernel &kernel : kernels)
    if (strcmp(kernel.name, name) == 0) return &kernel;
  snprintf(error, sizeof error, "no kernel named %s", name);
  return nullptr;
}

inline bool check_argument(const Kernel &kernel, unsigned int index, char kind,
                           unsigned int size) {
  const Parameter &wanted = kernel.parameters[index];
  const bool pointer = wanted.kind == 'p' || wanted.kind == 'c';
  if (wanted.size == size && (pointer ? kind == 'p' : wanted.kind == kind)) return true;
  snprintf(error, sizeof error, "%s: argument %u is '%c' of %u bytes, the kernel takes '%c' of %u",
           kernel.name, index, kind, size, pointer ? 'p' : wanted.kind, wanted.size);
  return false;
}

inline bool check_count(const Kernel &kernel, unsigned int count) {
  if (kernel.parameter_count == count) return true;
  snprintf(error, sizeof error, "%s: %u arguments given, the kernel takes %u", kernel.name, count,
           kernel.parameter_count);
  return false;
}

}  // namespace cuda_emulation

// In-process launch, like the CUDA driver's: arguments[i] points to the value of argument i.
// kinds[i] and sizes[i] describe it ('p', 'f', 'i', 'u'). Returns null, or the error.
extern "C" const char *cuda_emulation_launch(const char *name, const unsigned int *grid,
                                             const unsigned int *block, uint64_t shared_bytes,
                                             uint64_t seed, unsigned int count, void **arguments,
                                             const char *kinds, const unsigned int *sizes) {
  using namespace cuda_emulation;
  const Kernel *kernel = find_kernel(name);
  if (!kernel || !check_count(*kernel, count)) return error;
  for (unsigned int i = 0; i < count; ++i)
    if (!check_argument(*kernel, i, kinds[i], sizes[i])) return error;
  const Launch launch = {name, {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]},
                         shared_bytes, seed, arguments};
  return run(launch, kernel->entry, nullptr, 0);
}

#ifdef CUDA_EMULATION_EXECUTABLE
namespace cuda_emulation {

[[noreturn]] inline void fail(const char *message) {
  fprintf(stderr, "emulation: %s\n", message);
  exit(3);
}
inline void read_bytes(void *target, size_t size) {
  if (fread(target, 1, size, stdin) != size) fail("the launch record is too short");
}
template <class T>
inline T read_value() {
  T value;
  read_bytes(&value, sizeof value);
  return value;
}

struct Buffer {
  char *memory;        // what was allocated
  char *data;          // where the kernel's pointer points
  uint64_t size;
  char *original;      // contents before the launch, for const pointers
};

}  // namespace cuda_emulation

int main(int count_of_words, char **words) {
  using namespace cuda_emulation;
  if (count_of_words > 1) {  // PROGRAM KERNEL prints the kinds of the kernel's parameters
    const Kernel *asked = find_kernel(words[1]);
    if (!asked) fail(error);
    for (unsigned int i = 0; i < asked->parameter_count; ++i) putchar(asked->parameters[i].kind);
    return 0;
  }
  char name[256] = {0};
  const unsigned int length = read_value<unsigned int>();
  if (length >= sizeof name) fail("the kernel's name is too long");
  read_bytes(name, length);
  const Kernel *kernel = find_kernel(name);
  if (!kernel) fail(error);
  Launch launch = {};
  launch.kernel = name;
  launch.grid = read_value<uint3>();
  launch.block = read_value<uint3>();
  launch.shared_bytes = read_value<uint64_t>();
  launch.seed = read_value<uint64_t>();
  const uint64_t block_count = read_value<uint64_t>();
  uint64_t *blocks = nullptr;
  if (block_count) {
    blocks = (uint64_t *)malloc(block_count * sizeof(uint64_t));
    read_bytes(blocks, block_count * sizeof(uint64_t));
  }
  shared_span_count = read_value<uint64_t>();
  shared_spans = (Span *)malloc((shared_span_count + 1) * sizeof(Span));
  read_bytes(shared_spans, shared_span_count * sizeof(Span));
  const unsigned int count = read_value<unsigned int>();
  if (!check_count(*kernel, count)) fail(error);
  void *values[64];
  void *arguments[64];
  Buffer buffers[64] = {};
  if (count > 64) fail("more than 64 arguments");
  for (unsigned int i = 0; i < count; ++i) {
    const char kind = read_value<char>();
    const unsigned int size = read_value<unsigned int>();
    if (!check_argument(*kernel, i, kind, size)) fail(error);
    arguments[i] = &values[i];
    if (kind != 'p') {
      if (size > sizeof values[i]) fail("a scalar of more than 8 bytes");
      read_bytes(&values[i], size);
      continue;
    }
    Buffer &buffer = buffers[i];
    const char fill = read_value<char>();  // 'd': the data follow; 'z': untouched zero pages
    const uint64_t offset = read_value<uint64_t>();
    buffer.size = read_value<uint64_t>();
    if (fill == 'z') {
      buffer.memory = (char *)mmap(nullptr, offset + buffer.size, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (buffer.memory == MAP_FAILED) fail("no address space for a sparse buffer");
    } else {
      // Exactly as long as the data: the sanitizer sees the first byte past the end. Offset 0
      // is aligned to 16 bytes.
      buffer.memory = (char *)malloc(offset + buffer.size);
    }
    buffer.data = buffer.memory + offset;
    if (fill == 'd') {
      read_bytes(buffer.data, buffer.size);
      if (kernel->parameters[i].kind == 'c') {
        buffer.original = (char *)malloc(buffer.size);
        memcpy(buffer.original, buffer.data, buffer.size);
      }
    } else {
      for (uint64_t pieces = read_value<uint64_t>(); pieces > 0; --pieces) {
        const uint64_t at = read_value<uint64_t>(), size_of_piece = read_value<uint64_t>();
        read_bytes(buffer.data + at, size_of_piece);
      }
    }
    values[i] = buffer.data;
  }
  launch.arguments = arguments;
  if (run(launch, kernel->entry, blocks, block_count)) fail(error);
  for (unsigned int i = 0; i < count; ++i) {
    const Buffer &buffer = buffers[i];
    if (!buffer.data) continue;
    if (buffer.original && memcmp(buffer.original, buffer.data, buffer.size) != 0)
      fail("the kernel wrote to a buffer that it takes as const");
    if (kernel->parameters[i].kind != 'p') continue;
    // A sparse buffer gives back the pieces that the caller names now.
    const uint64_t pieces = read_value<uint64_t>();
    for (uint64_t piece = 0; piece < pieces; ++piece) {
      const uint64_t at = read_value<uint64_t>(), size_of_piece = read_value<uint64_t>();
      fwrite(buffer.data + at, 1, size_of_piece, stdout);
    }
  }
  return 0;
}
#endif
