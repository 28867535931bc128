// Statistics of one linear's input in one pass: per-channel absmax, sum and sum of squares, and a
// histogram of |x| by bit pattern. The plain torch version in forge_ptq/numerics/observer.py says
// what has to come out; this file only avoids its five passes, of which torch.bincount is the worst.
//
// Rows are walked in order, in blocks of channels. Each block is read once: arithmetic first, in a
// loop without branches that every compiler turns into vector instructions, which also leaves the
// histogram codes of the block in a small buffer; then one scalar loop counts those codes.
//
// Counts and absmax are integers (absmax as a bit pattern: non-negative floats are ordered like
// their patterns, and a NaN is above all of them), so they cannot depend on the order of work. The
// sums are defined: one double per channel, to which rows are added in order. A square of a float is
// exact in a double, so contraction to FMA changes nothing, and no result depends on the vector
// width, on the block size or on how channels are shared out among threads.
//
// Build without -ffast-math: besides reordering sums, it makes GCC link start-up code that switches
// denormals off for the whole process that loads the library.

#include <cstdint>
#include <cstring>

namespace {

// As MANTISSA_SHIFT in forge_ptq/numerics/stats.py; checked when the library is loaded.
constexpr int kMantissaShift = 20;
constexpr int kCodes = 1 << (31 - kMantissaShift);
constexpr int kNonFinite = 0x7f800000 >> kMantissaShift;

// Neighbouring elements often have the same code, and an increment has to wait for the last one of
// the same counter to leave the store buffer. Counters of a code are side by side: four tables 8 KiB
// apart would falsely depend on each other wherever their addresses agree in the low 12 bits.
constexpr int kLanes = 4;

// Elements counted per prefetched cache line: one line of fp32.
constexpr int kStep = 16;

// Codes of one block (2 bytes each) and its slices of the accumulators stay in L1.
constexpr int64_t kBlock = 512;

// A 32-bit counter must be emptied before it can wrap; one row adds at most its width. A thousandth
// of what would be safe costs a thousandth of the time, and no test needs 2^32 elements to see it.
constexpr int64_t kCountersHold = int64_t{1} << 22;

struct BFloat16 { uint16_t bits; };
struct Half { uint16_t bits; };

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline float widen(float x) { return x; }

inline float widen(BFloat16 x) { return float_of(uint32_t{x.bits} << 16); }

// By hand and without branches, since C++ has no portable 16-bit float before C++23. Normal numbers
// get their exponent rebiased by 112; infinities and NaNs by 224, which makes 31 a 255. A subnormal
// is m * 2^-24: with the exponent of 2^-14 set it reads 2^-14 + m * 2^-24, exactly, and the
// subtraction is exact too, even while the process flushes denormals.
inline float widen(Half x) {
    const uint32_t sign = (uint32_t{x.bits} & 0x8000u) << 16;
    const uint32_t rest = (uint32_t{x.bits} & 0x7fffu) << 13;
    const uint32_t exponent = rest & 0x0f800000u;
    const uint32_t rebias = exponent == 0x0f800000u ? 224u << 23 : 112u << 23;
    const uint32_t small = bits_of(float_of(rest | 113u << 23) - float_of(113u << 23));
    return float_of((exponent == 0 ? small : rest + rebias) | sign);
}

struct Sums {
    uint32_t *absmax_C;  // bit patterns of |x|
    double *sum_C;
    double *sum_sq_C;
};

template <class T, bool kScaled>
inline void add_block(const T *__restrict x, const float *__restrict factor, int64_t size,
                      uint32_t *__restrict absmax, double *__restrict sum,
                      double *__restrict sum_sq, uint16_t *__restrict codes) {
    for (int64_t c = 0; c < size; ++c) {
        const float value = kScaled ? widen(x[c]) * factor[c] : widen(x[c]);
        const uint32_t magnitude = bits_of(value) & 0x7fffffffu;
        absmax[c] = absmax[c] < magnitude ? magnitude : absmax[c];
        codes[c] = static_cast<uint16_t>(magnitude >> kMantissaShift);
        const double wide = value;
        sum[c] += wide;
        sum_sq[c] += wide * wide;
    }
}

// ``next`` is what add_block reads after this, ``lines`` cache lines of it. Counting takes longer than
// fetching them, but the hardware's prefetcher gives up meanwhile.
inline void count_block(const uint16_t *__restrict codes, int64_t size, uint32_t *__restrict counts,
                        const char *next, int64_t lines) {
    int64_t i = 0, line = 0;
    for (; i + kStep <= size; i += kStep) {
        if (line < lines) {
            __builtin_prefetch(next + 64 * line++);
        }
        for (int step = 0; step < kStep; ++step) {
            ++counts[codes[i + step] * kLanes + step % kLanes];
        }
    }
    for (; i < size; ++i) {
        ++counts[codes[i] * kLanes];
    }
}

void empty_counters(uint32_t *counts, int64_t *histogram) {
    for (int code = 0; code < kCodes; ++code) {
        for (int lane = 0; lane < kLanes; ++lane) {
            histogram[code] += counts[code * kLanes + lane];
        }
    }
    std::memset(counts, 0, sizeof(uint32_t) * kCodes * kLanes);
}

// What is passed per call, so that the two layers of templates below stay readable.
struct Input {
    const void *x;
    int64_t row_stride;
    int64_t rows;             // that x has
    const int64_t *index_N;   // which of them count, or null: all
    int64_t indices;          // how many count
    int64_t channels;
    const float *factor_C;    // or null
};

template <class T, bool kScaled>
bool observe(const Input &in, Sums to, int64_t *histogram) {
    alignas(64) uint32_t counts[kCodes * kLanes] = {};
    alignas(64) uint16_t codes[kBlock];
    int64_t counted = 0;
    const auto row = [&in](int64_t n) {
        const int64_t at = in.index_N == nullptr ? n : in.index_N[n];
        return at < 0 || at >= in.rows ? nullptr
                                       : static_cast<const T *>(in.x) + in.row_stride * at;
    };
    for (int64_t n = 0; n < in.indices; ++n) {
        const T *x = row(n);
        if (x == nullptr) {
            return false;
        }
        const T *next_row = n + 1 < in.indices ? row(n + 1) : nullptr;
        if (counted + in.channels > kCountersHold) {
            empty_counters(counts, histogram);
            counted = 0;
        }
        counted += in.channels;
        for (int64_t c = 0; c < in.channels; c += kBlock) {
            const int64_t left = in.channels - c;
            const int64_t size = left < kBlock ? left : kBlock;
            add_block<T, kScaled>(x + c, kScaled ? in.factor_C + c : nullptr, size,
                                  to.absmax_C + c, to.sum_C + c, to.sum_sq_C + c, codes);
            const T *next = left > kBlock ? x + c + kBlock : next_row;
            const int64_t ahead = left > kBlock ? left - kBlock : in.channels;
            const int64_t bytes = (ahead < kBlock ? ahead : kBlock) * int64_t{sizeof(T)};
            count_block(codes, size, counts, reinterpret_cast<const char *>(next),
                        next == nullptr ? 0 : (bytes + 63) / 64);
        }
    }
    empty_counters(counts, histogram);
    return true;
}

template <class T>
bool observe(const Input &in, Sums to, int64_t *histogram) {
    return in.factor_C == nullptr ? observe<T, false>(in, to, histogram)
                                  : observe<T, true>(in, to, histogram);
}

}  // namespace

extern "C" {

enum { kClean = 0, kDirty = 1, kRefused = 2 };

// Overwrites absmax_C, sum_C, sum_sq_C and histogram[kCodes] with the statistics of an input.
// dtype: 0 fp32, 1 bf16, 2 fp16. Elements of a row are adjacent, rows are row_stride elements apart.
// Returns kDirty if anything was NaN or infinite (the statistics are of no use then), kRefused for
// an unknown dtype or an index outside the rows.
int forge_ptq_observe(const void *x, int dtype, int64_t row_stride, int64_t rows,
                      const int64_t *index_N, int64_t indices, int64_t channels,
                      const float *factor_C, uint32_t *absmax_C, double *sum_C, double *sum_sq_C,
                      int64_t *histogram) {
    const Input in{x, row_stride, rows, index_N, indices, channels, factor_C};
    const Sums to{absmax_C, sum_C, sum_sq_C};
    std::memset(absmax_C, 0, sizeof *absmax_C * channels);
    std::memset(sum_C, 0, sizeof *sum_C * channels);
    std::memset(sum_sq_C, 0, sizeof *sum_sq_C * channels);
    std::memset(histogram, 0, sizeof *histogram * kCodes);
    const bool done = dtype == 0   ? observe<float>(in, to, histogram)
                      : dtype == 1 ? observe<BFloat16>(in, to, histogram)
                      : dtype == 2 ? observe<Half>(in, to, histogram)
                                   : false;
    int64_t non_finite = 0;
    for (int code = kNonFinite; code < kCodes; ++code) {
        non_finite += histogram[code];
    }
    return !done ? kRefused : non_finite != 0 ? kDirty : kClean;
}

// Adds the statistics of one input to those of all before it.
void forge_ptq_merge(int64_t channels, const uint32_t *__restrict absmax_C,
                     const double *__restrict sum_C, const double *__restrict sum_sq_C,
                     const int64_t *__restrict histogram, uint32_t *__restrict total_absmax_C,
                     double *__restrict total_sum_C, double *__restrict total_sum_sq_C,
                     int64_t *__restrict total_histogram) {
    for (int64_t c = 0; c < channels; ++c) {
        const uint32_t seen = absmax_C[c];
        total_absmax_C[c] = total_absmax_C[c] < seen ? seen : total_absmax_C[c];
        total_sum_C[c] += sum_C[c];
        total_sum_sq_C[c] += sum_sq_C[c];
    }
    for (int code = 0; code < kCodes; ++code) {
        total_histogram[code] += histogram[code];
    }
}

}  // extern "C"
