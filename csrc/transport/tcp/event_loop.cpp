#include "transport/tcp/event_loop.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <exception>
#include <limits>
#include <system_error>

namespace xmesh::transport {
namespace {

constexpr uint64_t kWakeupId = 0;
constexpr int kMaxEvents = 64;

void epollAdd(int epoll, int fd, uint32_t events, uint64_t id) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  if (::epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) != 0) {
    throw std::system_error(errno, std::generic_category(), "epoll_ctl");
  }
}

}  // namespace

EventLoop::EventLoop(std::function<bool()> turn_end, std::function<void(const std::string&)> error_sink)
    : turn_end_(std::move(turn_end)), error_sink_(std::move(error_sink)) {
  epoll_ = Fd(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_.valid()) {
    throw std::system_error(errno, std::generic_category(), "epoll_create1");
  }
  wakeup_ = Fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wakeup_.valid()) {
    throw std::system_error(errno, std::generic_category(), "eventfd");
  }
  // Edge-triggered: every write wakes the loop once, and nobody has to read the counter.
  epollAdd(epoll_.get(), wakeup_.get(), EPOLLIN | EPOLLET, kWakeupId);
}

EventLoop::~EventLoop() {
  stop();
  join();
}

void EventLoop::start() {
  // Signals belong to the process's own threads.
  sigset_t all;
  sigset_t old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  try {
    thread_ = std::thread([this] { run(); });
    pthread_setname_np(thread_.native_handle(), "xmesh_network");
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &old, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
}

void EventLoop::stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  if (sleeps_) {
    sleeps_ = false;
    eventfd_write(wakeup_.get(), 1);
  }
}

void EventLoop::join() {
  if (thread_.joinable()) {
    thread_.join();
  }
}

void EventLoop::post(Task task) {
  bool wake = false;
  {
    const std::lock_guard lock(mutex_);
    posted_.push_back(std::move(task));
    wake = std::exchange(sleeps_, false);
  }
  if (wake) {
    eventfd_write(wakeup_.get(), 1);
  }
}

uint64_t EventLoop::startTimer(std::chrono::milliseconds delay, Task task) {
  const uint64_t id = next_id_++;
  const auto due = Clock::now() + std::max(delay, std::chrono::milliseconds(0));
  timers_.emplace(std::pair(due, id), std::move(task));
  timer_due_.emplace(id, due);
  return id;
}

void EventLoop::cancelTimer(uint64_t timer) {
  const auto found = timer_due_.find(timer);
  if (found != timer_due_.end()) {
    timers_.erase({found->second, timer});
    timer_due_.erase(found);
  }
}

uint64_t EventLoop::add(int fd, uint32_t events, FdHandler& handler) {
  const uint64_t id = next_id_++;
  epollAdd(epoll_.get(), fd, events, id);
  registrations_.emplace(id, Registration{fd, &handler});
  return id;
}

void EventLoop::remove(uint64_t id) {
  const auto found = registrations_.find(id);
  if (found != registrations_.end()) {
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, found->second.fd, nullptr);
    registrations_.erase(found);
  }
}

template <typename Call>
void EventLoop::guard(const Call& call) {
  try {
    call();
  } catch (const std::exception& error) {
    error_sink_(error.what());
  } catch (...) {
    error_sink_("unknown exception");
  }
}

void EventLoop::run() {
  thread_id_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  bool may_sleep = false;
  while (true) {
    {
      const std::lock_guard lock(mutex_);
      if (stopped_) {
        return;
      }
      sleeps_ = may_sleep && posted_.empty();
      may_sleep = sleeps_;
    }
    turn(may_sleep);
    may_sleep = true;
    guard([&] { may_sleep = !turn_end_(); });
  }
}

void EventLoop::turn(bool may_sleep) {
  std::array<epoll_event, kMaxEvents> events;
  const int count = ::epoll_wait(epoll_.get(), events.data(), kMaxEvents, timeoutMs(may_sleep));
  {
    const std::lock_guard lock(mutex_);
    sleeps_ = false;
    running_.swap(posted_);
  }
  for (int i = 0; i < count; ++i) {
    const auto found = registrations_.find(events[static_cast<size_t>(i)].data.u64);
    if (found != registrations_.end()) {
      FdHandler* handler = found->second.handler;
      guard([&] { handler->onEvents(events[static_cast<size_t>(i)].events); });
    }
  }
  for (Task& task : running_) {
    guard(task);
    task = nullptr;
  }
  running_.clear();
  runTimers();
}

int EventLoop::timeoutMs(bool may_sleep) const {
  if (!may_sleep) {
    return 0;
  }
  if (timers_.empty()) {
    return -1;
  }
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(timers_.begin()->first.first - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, std::numeric_limits<int>::max()));
}

void EventLoop::runTimers() {
  if (timers_.empty()) {
    return;
  }
  // Timers that the tasks start now wait for the next turn.
  const auto now = Clock::now();
  const uint64_t first_new_id = next_id_;
  for (auto it = timers_.begin(); it != timers_.end() && it->first.first <= now && it->first.second < first_new_id; it = timers_.begin()) {
    const Task task = std::move(it->second);
    timer_due_.erase(it->first.second);
    timers_.erase(it);
    guard(task);
  }
}

}  // namespace xmesh::transport
