// The parameter records: one by-value struct per kernel. replayssm_cupy/plan.py holds the same
// fields in the same order, and a test compares the two.
// Strides count elements of the array's own type. The last axis of x, B, C, z, out, state and the
// rings is contiguous; `dt`, `A`, `D` and `dt_bias` hold one value per head.
#pragma once
#if defined(REPLAYSSM_HOST)
#include <cstdint>
#else
using int64_t = long long;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
#endif

// Types that are chosen at run time. A scalar per head costs nothing to convert, so the element
// types of dt, A, D and dt_bias are not template parameters.
enum FloatType : int { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };
enum IndexType : int { kInt32 = 0, kInt64 = 1 };

// What a step has, as the small form asks for it.
enum SmallFlag : int {
  kHasSlots = 1,
  kSlotsInt64 = 2,
  kStartsEarly = 4,  // before the kernel ahead has ended
  kPacked = 8,       // cu_seqlens
  kSeveralQuads = 16,
  kByPlace = 32,  // ring rows are all of the ring, by their places
  kGated = 64,    // z
  kWideOut = 128,
  kWideDt = 256,         // float32; then those of dt_bias, A and D
  kNarrowDt = 4096,      // 16 bits; likewise
  kHalfScalars = 65536,  // one of dt, dt_bias, A and D is float16
  kSoftplus = 131072,
  kForcedFlushes = 262144,
  kRowsFirst = 524288,  // blocks of the batch along x, where they are too many along y
};

// First what the small form takes whatever its instance knows, in the order in which it needs it:
// each 64 bytes that are not in the constant cache yet are waited for. Its strides are bytes; that
// of a sequence is a token's in a packed batch.
struct CheckpointingSsuRecord {
  const void* slots;  // (batch,) or null: slot = batch row
  int flags;          // of SmallFlag
  int num_slots;
  void* state;  // (num_slots, nheads, head_dim, dstate), written on flush
  int state_slot_bytes;
  int pad_slot;                    // pad_slot_id, or -1 if that is no slot
  void* x_cache;                   // (num_slots, nheads, ring_buffer_len, head_dim), appended
  int rows_of_block, state_warps;  // of the state, and warps for them
  // B and its ring, whose fields lanes take by what they load.
  const void* B;  // (batch, npredicted, ngroups, dstate)
  void* B_cache;  // (num_slots, ngroups, ring_buffer_len, dstate), appended
  int B_sequence_bytes, B_cache_slot_bytes;
  float* dt_cache;  // (num_slots, nheads, ring_buffer_len), appended
  int dt_cache_slot_bytes, x_cache_slot_bytes;
  const int* ring_start;                // (num_slots,)
  const int* prev_num_accepted_tokens;  // (num_slots,)
  const void* C;                        // (batch, npredicted, ngroups, dstate)
  int C_sequence_bytes, x_sequence_bytes;
  const void* x;  // (batch, npredicted, nheads, head_dim)
  void* out;      // (batch, npredicted, nheads, head_dim)
  int out_sequence_bytes, out_head_bytes, out_item_bytes;
  int threads;                  // of a block
  int last_row;                 // of the ring that is looked at
  int inverse_heads_per_group;  // 2^31 / heads_per_group, rounded up
  float* state_scale;           // (num_slots, nheads, head_dim), of codes, or null
  int state_scale_slot_bytes;
  int zero_padding;  // 1: rows of `out` of padding become 0
  // Numbers of a head, which lanes take by their index, and what they are: kWide and kNarrow.
  const void* dt;       // (batch, npredicted, nheads)
  const void* dt_bias;  // (nheads,) or null
  const void* A;        // (nheads,)
  const void* D;        // (nheads,) or null
  int dt_sequence_bytes, slots_bytes;
  // From here on nothing is in order of use.
  int dt_head_bytes, dt_bias_bytes, A_bytes, D_bytes;
  int dt_type, dt_bias_type, A_type, D_type;  // FloatType
  int B_group_bytes, B_cache_group_bytes, B_token_bytes, B_cache_row_bytes;
  int C_group_bytes, C_token_bytes, x_head_bytes, x_token_bytes;
  int state_head_bytes, state_scale_head_bytes, x_cache_head_bytes, x_cache_row_bytes;
  int dt_token_bytes, dt_cache_head_bytes, dt_cache_row_bytes, out_token_bytes;
  int ring_start_bytes, prev_num_accepted_tokens_bytes;
  int heads_per_group, head_dim, max_window, ring_buffer_len, npredicted;
  int z_sequence_bytes, z_head_bytes, z_token_bytes;
  const void* z;          // (batch, npredicted, nheads, head_dim) or null
  const int* cu_seqlens;  // (batch + 1,) or null: npredicted tokens in every row
  // Strides of all forms, in elements.
  int64_t slots_stride;
  int64_t pad_slot_id;
  int64_t C_batch_stride, C_token_stride, C_group_stride;
  int64_t x_batch_stride, x_token_stride, x_head_stride;
  int64_t state_slot_stride, state_head_stride;
  int64_t state_scale_slot_stride, state_scale_head_stride;
  int64_t x_cache_slot_stride, x_cache_head_stride, x_cache_row_stride;
  int64_t out_batch_stride, out_token_stride, out_head_stride;
  int64_t dt_batch_stride, dt_token_stride, dt_head_stride;
  int64_t dt_bias_stride, A_stride, D_stride;
  int64_t B_batch_stride, B_token_stride, B_group_stride;
  int64_t B_cache_slot_stride, B_cache_group_stride, B_cache_row_stride;
  int64_t dt_cache_slot_stride, dt_cache_head_stride, dt_cache_row_stride;
  int64_t ring_start_stride, prev_num_accepted_tokens_stride;
  int64_t z_batch_stride, z_token_stride, z_head_stride;
  const unsigned char* force_flush;  // (batch,) or null: not 0 folds whatever is live
  int64_t force_flush_stride;
  int slots_type;            // IndexType
  int out_type;              // FloatType: that of x, or kFloat32
  int starts_early;          // 1: before the kernel ahead has ended
  int dt_softplus;           // 0 or 1
  const int64_t* rand_seed;  // (1,) or null: round to nearest
  int philox_rounds, layer;  // of the random bits; layer -1: the seed as it is
  void* state_copy;          // (num_slots, nheads, bytes...) read instead, or null
  int64_t state_copy_slot_stride, state_copy_head_stride;
  const int* events;  // (num_slots,) of flushes, for their random bits, or null
  int64_t events_stride;
  unsigned* tickets;  // (num_slots,) of zeros, which are zeros again behind the step, or null
  float* cb_scaled;   // (batch, nheads, words), scratch of two kernels, or null
  float* cumAdt_vec;  // (batch, nheads, words), likewise
  float* cb_old;      // (batch, nheads, words), likewise
  // Of the form for many heads; the inverses are as `divide` takes them.
  int64_t inverse_items_of_sequence, inverse_items_of_group;
  int64_t inverse_flushes_of_sequence, inverse_flushes_of_group;
  int heads_of_item, items_of_sequence, items_of_group;       // at most 8 heads
  int heads_of_flush, flushes_of_sequence, flushes_of_group;  // of items that flush
  int inverse_pieces;                                         // 2^16 / (head_dim / 8), rounded up
  // Where a warp's share of shared memory begins behind the list, or a block's of a state with a
  // copy: its bytes, and in them the places of the parts, as replayssm_cupy/schedule.py lays them
  // out.
  int nheads, batch;
  int most_listed, bytes_of_list;  // sequences at a time, and their bytes before the shares
  int bytes_of_share;
  int at_group, at_head, at_outputs, at_products, at_scales_of_C, at_dt, at_weights, at_scales;
  int at_cursors;
  int cb_scaled_words, cumAdt_vec_words, cb_old_words;  // 4 bytes each, of a head
  int shared_items;     // at the end of the list, which go to whichever warp is free; 0 without
                        // tickets
  int appends_late;     // 1: x of the one new row goes to the rings behind all items
  int early_sequences;  // at the beginning of a list, whose items are the first ones of warps
  int tight_rows;       // 1: x without padding, outputs of 16 bits, see `kMayBeTight`
};

// The record as a kernel sees it. An instance for one layout of the arrays knows sizes and strides
// when it is compiled, which hide those of the record; replayssm_cupy/keys.py lists them.
struct CheckpointingSsuParams : CheckpointingSsuRecord {
#if defined(REPLAYSSM_KNOWN)
  static constexpr bool kKnown = true;
  REPLAYSSM_KNOWN
#else
  static constexpr bool kKnown = false;
#endif
};

struct SelectiveStateUpdateParams {
  void* state;               // (num_slots, nheads, head_dim, dstate), updated
  float* state_scale;        // (num_slots, nheads, head_dim), of 8-bit states, or null
  const void* x;             // (batch, npredicted, nheads, head_dim)
  const void* dt;            // (batch, npredicted, nheads)
  const void* A;             // (nheads,)
  const void* B;             // (batch, npredicted, ngroups, dstate)
  const void* C;             // (batch, npredicted, ngroups, dstate)
  const void* D;             // (nheads,) or null
  const void* z;             // (batch, npredicted, nheads, head_dim) or null
  const void* dt_bias;       // (nheads,) or null
  const void* slots;         // (batch,) or null: slot = batch row
  const int64_t* rand_seed;  // (1,) or null: round to nearest
  void* out;                 // (batch, npredicted, nheads, head_dim)
  int64_t state_slot_stride, state_head_stride;
  int64_t state_scale_slot_stride, state_scale_head_stride;
  int64_t x_batch_stride, x_token_stride, x_head_stride;
  int64_t dt_batch_stride, dt_token_stride, dt_head_stride;
  int64_t A_stride;
  int64_t B_batch_stride, B_token_stride, B_group_stride;
  int64_t C_batch_stride, C_token_stride, C_group_stride;
  int64_t D_stride;
  int64_t z_batch_stride, z_token_stride, z_head_stride;
  int64_t dt_bias_stride;
  int64_t out_batch_stride, out_token_stride, out_head_stride;
  int64_t slots_stride;
  int64_t pad_slot_id;
  int num_slots, batch, npredicted, nheads, heads_per_group, head_dim;
  int slots_type;                             // IndexType
  int dt_type, A_type, D_type, dt_bias_type;  // FloatType
  int out_type;                               // FloatType: that of x, or kFloat32
  int dt_softplus;                            // 0 or 1
  int zero_padding;                           // 1: rows of `out` of padding become 0
  int philox_rounds, layer;  // of the random bits; layer -1 takes the seed as it is
};

struct AdvanceRingParams {
  int* ring_start;                   // (num_slots,), updated
  int* prev_num_accepted_tokens;     // (num_slots,), updated
  const void* num_accepted;          // (batch,)
  const void* query_lens;            // (batch,) or null: npredicted everywhere
  const void* slots;                 // (batch,) or null: slot = batch row
  const unsigned char* reset;        // (batch,) or null: not 0 starts the slot anew
  const unsigned char* force_flush;  // (batch,) or null: the step's own
  int64_t* rand_seed;                // (1,), incremented, or null
  int64_t ring_start_stride, prev_num_accepted_tokens_stride;
  int64_t num_accepted_stride, query_lens_stride, slots_stride, reset_stride, force_flush_stride;
  int64_t pad_slot_id;
  int num_slots, batch, npredicted, max_window, ring_buffer_len;
  int num_accepted_type, query_lens_type, slots_type;  // IndexType
};

struct BeginStepParams {
  int* positions;                 // (num_slots, words), moved on
  const void* slots;              // (batch,) or null: slot = batch row
  const void* num_accepted;       // (batch,) of the window before, or null: all of it
  const int* cu_seqlens;          // (batch + 1,) or null: npredicted tokens in every row
  int* ring_start;                // (num_slots,), written
  int* prev_num_accepted_tokens;  // (num_slots,), written
  int* events;                    // (num_slots,), written
  int64_t* rand_seed;             // (1,), written
  int64_t positions_slot_stride, positions_word_stride, slots_stride, num_accepted_stride;
  int64_t pad_slot_id, seed;
  int num_slots, batch, npredicted, max_window, ring_buffer_len, words;
  int slots_type, num_accepted_type;  // IndexType
};

constexpr int kRings = 3;  // x, B and dt

// Words have four bytes; strides count them.
struct ClearRingsParams {
  void* rings[kRings];  // each (num_slots, heads, words_of_head), zeroed
  int64_t ring_slot_strides[kRings];
  int64_t ring_head_strides[kRings];
  int* positions;     // (num_slots, words), zeroed
  const void* slots;  // (batch,) or null: slot = batch row
  int64_t positions_slot_stride, positions_word_stride, slots_stride, pad_slot_id;
  int heads[kRings];
  int words_of_head[kRings];
  int num_slots, batch, words;
  int slots_type;  // IndexType
};

// States of up to this many layers are reset by one launch; the table travels with the launch.
constexpr int kMaxResetLayers = 128;

struct ResetSlotsParams {
  float* state_scales[kMaxResetLayers];  // each (num_slots, nheads, head_dim), or null
  int64_t state_scale_slot_strides[kMaxResetLayers];
  int64_t state_scale_head_strides[kMaxResetLayers];
  void* states[kMaxResetLayers];                // each (num_slots, nheads, head_dim, dstate)
  int64_t state_slot_strides[kMaxResetLayers];  // in 16-byte units
  int64_t state_head_strides[kMaxResetLayers];  // in 16-byte units
  int* ring_start;                              // (num_slots,), or null: states only
  int* prev_num_accepted_tokens;                // (num_slots,), or null: states only
  const void* slots;                            // (batch,) or null: slot = batch row
  int64_t ring_start_stride, prev_num_accepted_tokens_stride, slots_stride;
  int64_t pad_slot_id;
  int num_slots, batch, nheads, head_dim, vectors_per_head;  // 16-byte vectors in a head's state
  int slots_type;                                            // IndexType
};

struct LoadStateParams {
  void* state;         // (num_slots, nheads, head_dim, dstate), the slots written
  void* state_copy;    // (num_slots, nheads, bytes...), the slots written, or null
  float* state_scale;  // (num_slots, nheads, head_dim), of codes, or null
  const void* source;  // (batch, nheads, head_dim, dstate)
  const void* slots;   // (batch,) or null: slot = batch row
  int64_t state_slot_stride, state_head_stride, state_copy_slot_stride, state_copy_head_stride;
  int64_t state_scale_slot_stride, state_scale_head_stride;
  int64_t source_batch_stride, source_head_stride;
  int64_t slots_stride;
  int64_t pad_slot_id;
  int64_t seed;  // of the random bits
  int num_slots, batch, nheads, head_dim, dstate;
  int slots_type;     // IndexType
  int philox_rounds;  // of a state with a copy; 0 rounds to nearest
};

// Tables of addresses and strides hold one entry per layer; inside a slot all layers lie alike.
struct MaterializeParams {
  const int64_t* state_ptrs;                // (layers,), of (num_slots, nheads, head_dim, dstate)
  const int64_t* state_slot_strides;        // (layers,)
  const int64_t* x_cache_ptrs;              // (layers,), of (num_slots, nheads, rows, head_dim)
  const int64_t* x_cache_slot_strides;      // (layers,)
  const int64_t* B_cache_ptrs;              // (layers,), of (num_slots, ngroups, rows, dstate)
  const int64_t* B_cache_slot_strides;      // (layers,)
  const int64_t* dt_cache_ptrs;             // (layers,), of (num_slots, nheads, rows) float32
  const int64_t* dt_cache_slot_strides;     // (layers,)
  const int64_t* A_ptrs;                    // (layers,), of (nheads,)
  const int64_t* state_scale_ptrs;          // (layers,), of (num_slots, nheads, head_dim), or 0
  const int64_t* state_scale_slot_strides;  // (layers,)
  const int64_t* state_copy_ptrs;           // (layers,), of (num_slots, nheads, bytes...), or null
  const int64_t* state_copy_slot_strides;   // (layers,), or null
  const void* src_slots;                    // (layers, batch)
  const void* dst_slots;                    // (layers, batch)
  const int* ring_start;                    // (batch,)
  const int* replay_prefix_len;             // (batch,), negative: nothing to do
  const int* active_request_indices;        // (batch,), up to a negative one, or null: all
  const int64_t* rand_seed;                 // (1,) or null: round to nearest
  int64_t state_head_stride, state_scale_head_stride, state_copy_head_stride;
  int64_t x_cache_head_stride, x_cache_row_stride;
  int64_t B_cache_group_stride, B_cache_row_stride;
  int64_t dt_cache_head_stride, dt_cache_row_stride;
  int64_t A_stride;
  int64_t src_slots_layer_stride, src_slots_batch_stride;
  int64_t dst_slots_layer_stride, dst_slots_batch_stride;
  int64_t ring_start_stride, replay_prefix_len_stride, active_request_indices_stride;
  int64_t pad_slot_id, num_slots;
  int layers, batch, nheads, heads_per_group, head_dim;
  int max_window, ring_buffer_len;
  int src_slots_type, dst_slots_type;  // IndexType
  int A_type;                          // FloatType
  int philox_rounds;                   // of the random bits; 0 rounds to nearest
};

struct PlanMaterializeParams {
  int* ring_start;                // (num_slots,), of destinations set to 0
  int* prev_num_accepted_tokens;  // (num_slots,), of destinations set to 0
  const void* src_slots;          // (batch,)
  const void* dst_slots;          // (batch,)
  const void* prefix_len;         // (batch,) or null: from boundaries
  const void* committed_lens;     // (batch,) tokens before the step, or null
  const void* num_accepted;       // (batch,) or null
  const void* boundaries;         // (batch,), negative: none, or null: multiples of block_size
  int* planned_ring_start;        // (batch,), written
  int* replay_prefix_len;         // (batch,), written; -1: nothing to do
  int* active_request_indices;    // (batch,), written: rows with something to do, then -1
  int64_t ring_start_stride, prev_num_accepted_tokens_stride;
  int64_t src_slots_stride, dst_slots_stride, prefix_len_stride, committed_lens_stride;
  int64_t num_accepted_stride, boundaries_stride, planned_ring_start_stride;
  int64_t replay_prefix_len_stride, active_request_indices_stride;
  int64_t block_size, pad_slot_id;
  int num_slots, batch, max_window, ring_buffer_len;
  int src_slots_type, dst_slots_type, prefix_len_type, committed_lens_type;  // IndexType
  int num_accepted_type, boundaries_type;                                    // IndexType
  int move_cursors;  // 1: those of the destinations
};

// The arrays of a slot: state, copy, scale, x, B and dt rings. Each is a number of blocks (heads,
// groups) of rows: those of a ring, of which the live ones count, or one. All strides are in bytes.
constexpr int kSlotArrays = 6;

struct CopySlotsParams {
  const int64_t* ptrs[kSlotArrays];          // (layers,), addresses, 0 where an array is not there
  const int64_t* slot_strides[kSlotArrays];  // (layers,), in elements
  int64_t block_strides[kSlotArrays];
  int64_t row_strides[kSlotArrays];
  int64_t image_offsets[kSlotArrays];  // of the array in a layer's part of an image
  unsigned char* image;                // (batch, image_bytes) or null: slot to slot
  int* image_live;                     // (batch,), live rows of the images, or null
  const void* src_slots;               // (batch,) or null: from images
  const void* dst_slots;               // (batch, copies) or null: to images
  int* ring_start;                     // (num_slots,), of destinations written
  int* prev_num_accepted_tokens;       // (num_slots,), of destinations written
  int64_t image_stride, image_layer_stride;
  int64_t src_slots_stride, dst_slots_batch_stride, dst_slots_copy_stride;
  int64_t ring_start_stride, prev_num_accepted_tokens_stride;
  int64_t pad_slot_id;
  int itemsizes[kSlotArrays];  // of an element
  int blocks[kSlotArrays];
  int row_bytes[kSlotArrays];
  int is_ring[kSlotArrays];
  int wide[kSlotArrays];  // 1: everything lies at multiples of 16 bytes, else of 4
  int num_slots, batch, copies, layers, max_window, ring_buffer_len;
  int image_rows;                      // of a ring in an image
  int src_slots_type, dst_slots_type;  // IndexType
};

// What a check found: one of the violations, else kNone.
enum Violation : int {
  kNone = 0,
  kRingStart = 1,
  kPrevNumAcceptedTokens = 2,
  kDuplicateSlot = 3,
  kCuSeqlens = 4,
  kSequenceLength = 5,
  kXNotFinite = 6,
  kBNotFinite = 7,
  kDtNotFinite = 8,
  kFoldedTwice = 9,
};

struct CheckStepParams {
  int64_t* report;                      // (4,): violation, batch row, value, legal bound; starts 0
  const int* ring_start;                // (num_slots,)
  const int* prev_num_accepted_tokens;  // (num_slots,)
  const void* slots;                    // (batch,) or null: slot = batch row
  const int* cu_seqlens;                // (batch + 1,) or null
  const unsigned char* force_flush;     // (batch,) or null
  const float* dt_cache;                // (num_slots, nheads, ring_buffer_len)
  const void* x_cache;                  // (num_slots, nheads, ring_buffer_len, head_dim)
  const void* B_cache;                  // (num_slots, ngroups, ring_buffer_len, dstate)
  int64_t* folds;  // (num_slots,) of the layer or null: cursors that were folded at, or 0
  int64_t ring_start_stride, prev_num_accepted_tokens_stride, slots_stride, force_flush_stride;
  int64_t dt_cache_slot_stride, dt_cache_head_stride, dt_cache_row_stride;
  int64_t x_cache_slot_stride, x_cache_head_stride, x_cache_row_stride;
  int64_t B_cache_slot_stride, B_cache_group_stride, B_cache_row_stride;
  int64_t pad_slot_id;
  int num_slots, batch, npredicted, tokens, nheads, ngroups, head_dim, dstate;
  int max_window, ring_buffer_len;
  int slots_type;    // IndexType
  int ring_type;     // FloatType of x_cache and B_cache
  int check_finite;  // 1: live ring rows must be finite
};

struct ForgetFoldsParams {
  int64_t* folds;     // (layers, num_slots)
  const void* slots;  // (batch,) or null: slot = batch row
  int64_t slots_stride, pad_slot_id;
  int num_slots, batch, layers;
  int slots_type;  // IndexType
};

// What a check of the metadata of `materialize` found.
enum MaterializeViolation : int {
  kActiveRange = 1,
  kActiveAfterEnd = 2,
  kActiveTwice = 3,
  kMaterializeRingStart = 4,
  kPrefixBeyondWindow = 5,
  kPrefixBeyondLive = 6,
  kDestinationTwice = 7,
  kDestinationIsSource = 8,
  kTableAddress = 9,
};

struct CheckMaterializeParams {
  int64_t* report;                      // (4,): violation, place, value, bound; starts 0
  const int64_t* state_ptrs;            // (layers,)
  const int64_t* x_cache_ptrs;          // (layers,)
  const int64_t* B_cache_ptrs;          // (layers,)
  const int64_t* dt_cache_ptrs;         // (layers,)
  const int64_t* A_ptrs;                // (layers,)
  const int64_t* state_scale_ptrs;      // (layers,)
  const int64_t* state_copy_ptrs;       // (layers,) or null
  const void* src_slots;                // (layers, batch)
  const void* dst_slots;                // (layers, batch)
  const int* ring_start;                // (batch,)
  const int* replay_prefix_len;         // (batch,)
  const int* active_request_indices;    // (batch,) or null: all
  const int* prev_num_accepted_tokens;  // (num_slots,) or null: not known
  int64_t src_slots_layer_stride, src_slots_batch_stride;
  int64_t dst_slots_layer_stride, dst_slots_batch_stride;
  int64_t ring_start_stride, replay_prefix_len_stride, active_request_indices_stride;
  int64_t prev_num_accepted_tokens_stride;
  int64_t pad_slot_id, num_slots;
  int layers, batch, max_window, ring_buffer_len;
  int src_slots_type, dst_slots_type;  // IndexType
  int scaled;                          // 1: codes, which have scales
  int copied;                          // 1: a state that has a copy
  int bytes_of_A;                      // of an element
};
