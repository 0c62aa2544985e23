#pragma once

#include <memory>
#include <mutex>
#include <utility>

#include "c10d/group_attachment.h"

namespace xmesh::c10d_backend {

/// Where a group keeps its attachment: made once, by the first thread that asks, and closed once. Any thread.
class AttachmentSlot {
 public:
  /// The attachment, made with `make` if there is none; other threads that ask meanwhile wait for it. nullptr once the slot is closed, also when that
  /// happens during the making: what was made is then closed without waiting for peers.
  template <class Make>
  std::shared_ptr<GroupAttachment> getOrMake(const Make& make) {
    const std::lock_guard making(making_);
    {
      const std::lock_guard lock(mutex_);
      if (is_closed_ || attachment_ != nullptr) {
        return attachment_;
      }
    }
    std::shared_ptr<GroupAttachment> made = make();
    {
      const std::lock_guard lock(mutex_);
      if (!is_closed_) {
        attachment_ = made;
        return made;
      }
    }
    made->close(/*abort=*/true);
    return nullptr;
  }

  /// Takes the attachment out, for the caller to close; none is made from now on. nullptr if there is none.
  std::shared_ptr<GroupAttachment> close() {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    return std::exchange(attachment_, nullptr);
  }

  /// Never closes it: in a forked child, which lacks its threads and where a lock may be held for ever.
  void leak() { new std::shared_ptr<GroupAttachment>(std::move(attachment_)); }  // NOLINT(bugprone-unused-raii)

  bool isClosed() const {
    const std::lock_guard lock(mutex_);
    return is_closed_;
  }

 private:
  std::mutex making_;  ///< held while an attachment is made; before mutex_
  mutable std::mutex mutex_;
  std::shared_ptr<GroupAttachment> attachment_;
  bool is_closed_ = false;
};

}  // namespace xmesh::c10d_backend
