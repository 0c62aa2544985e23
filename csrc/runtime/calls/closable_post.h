#pragma once

#include <functional>
#include <mutex>
#include <utility>

namespace xmesh::runtime {

/// Runs tasks on some thread, until that is closed. Any thread.
class ClosablePost {
 public:
  using Post = std::function<void(std::function<void()> task)>;

  explicit ClosablePost(Post post) : post_(std::move(post)) {}
  /// No-op once it is closed: the task is dropped.
  void operator()(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    if (post_) {
      post_(std::move(task));
    }
  }
  /// From when this returns nothing is posted.
  void close() {
    const std::lock_guard lock(mutex_);
    post_ = nullptr;
  }

 private:
  std::mutex mutex_;
  Post post_;  ///< guarded by mutex_, also while it runs
};

}  // namespace xmesh::runtime
