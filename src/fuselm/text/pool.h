// Threads that encode while Python reads on. They never need its lock: a thread of Python that has encoded a block
// would have to wait for it until another one has turned the next text into UTF-8.
//
//   Pool pool(encoder, 1);                                        // at most one thread beside the caller's
//   pool.put({text, ends, 1, nullptr, nullptr, out, counts});     // and more
//   pool.finish();                                                // of the first put, which is then forgotten
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "encode.h"

namespace fuselm {

// Texts that lie one behind the other, and where their ids are wanted. counts[i] becomes the number of ids of text i.
struct Texts {
  const byte* text;
  const int64_t* ends;
  int64_t count;
  const byte *allowed, *refused;
  id_t* out;
  int64_t* counts;
};

// The number of ids of all texts, or what Scratch::encode says is wrong with one, or -1 when memory is lacking.
inline int64_t encode_texts(Scratch& scratch, const Texts& texts) noexcept try {
  int64_t begin = 0, total = 0;
  for (int64_t i = 0; i < texts.count; begin = texts.ends[i++]) {
    const int64_t size = texts.ends[i] - begin;
    const int64_t ids = scratch.encode(texts.text + begin, size, texts.allowed, texts.refused, texts.out + total);
    if (ids < 0) return ids;
    total += texts.counts[i] = ids;
  }
  return total;
} catch (const std::exception&) {
  return -1;
}

class Pool {
 public:
  Pool(Encoder& encoder, int64_t most_helpers) : encoder_(encoder), most_helpers_(most_helpers), scratch_(encoder) {}

  ~Pool() { stop(); }

  // Returns when no helper works any more. Jobs that nobody has begun are left to whoever finishes them.
  void stop() {
    std::vector<std::thread> ending;  // taken out: two may stop a pool at once
    {
      std::lock_guard lock(mutex_);
      stopped_ = true;
      most_helpers_ = 0;
      ending.swap(helpers_);
    }
    wake_.notify_all();
    for (std::thread& helper : ending) helper.join();
  }

  // The texts and where the ids go must stay until `finish` has returned them, or the pool is gone.
  void put(const Texts& texts) {
    {
      std::lock_guard lock(mutex_);
      jobs_.push_back({texts});
      // The caller takes what nobody has begun when it comes to finish it: a single job needs no helper.
      const int64_t wanted = std::min(most_helpers_, int64_t(jobs_.size()) - 1);
      if (int64_t(helpers_.size()) < wanted) add_helper();
    }
    wake_.notify_one();
  }

  // Whether there is a first job, and it is done.
  bool ready() {
    std::lock_guard lock(mutex_);
    return !jobs_.empty() && jobs_.front().done;
  }

  // What became of the first job. The caller works too while it is not done. There must be one.
  int64_t finish() {
    std::unique_lock lock(mutex_);
    while (!jobs_.front().done) {
      if (begun_ < jobs_.size())
        work(scratch_, lock);
      else
        done_.wait(lock);
    }
    const int64_t result = jobs_.front().result;
    jobs_.pop_front();
    --begun_;
    return result;
  }

 private:
  struct Job {
    Texts texts;
    int64_t result = 0;
    bool done = false;
  };

  // Where the system has no thread to give, those that are there do all the work.
  void add_helper() {
    try {
      helpers_.emplace_back([this] { help(); });
    } catch (const std::system_error&) {
      most_helpers_ = int64_t(helpers_.size());
    }
  }

  void help() {
    Scratch scratch(encoder_);
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return stopped_ || begun_ < jobs_.size(); });
      if (stopped_) return;
      work(scratch, lock);
    }
  }

  // The first job that nobody has begun, with the lock given back meanwhile.
  void work(Scratch& scratch, std::unique_lock<std::mutex>& lock) {
    Job& job = jobs_[begun_++];  // a deque: it stays where it is when others come and go at the ends
    lock.unlock();
    const int64_t result = encode_texts(scratch, job.texts);
    lock.lock();
    job.result = result;
    job.done = true;
    done_.notify_one();
  }

  Encoder& encoder_;
  int64_t most_helpers_;
  Scratch scratch_;
  std::vector<std::thread> helpers_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::deque<Job> jobs_;  // in the order they came
  size_t begun_ = 0;      // how many of them somebody works on, or has worked on
  bool stopped_ = false;
};

}  // namespace fuselm
