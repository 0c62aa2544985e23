#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace xmesh::core {

/// Which way to plan and its options; a plain value. Text form: name[:word+word][,option=number...], for example "send_recv", "broadcast",
/// "broadcast:naive+greedy,seed=3", "striped:num_chunks=64". Words and options that are not written have their defaults.
struct Strategy {
  std::string name = "auto";
  std::map<std::string, std::string> words;  ///< every word of the strategy by its slot ("senders" -> "size")
  std::map<std::string, int64_t> options;    ///< every option of the strategy by name ("seed" -> 0)

  const std::string& word(const std::string& slot) const { return words.at(slot); }
  int64_t option(const std::string& option_name) const { return options.at(option_name); }
  /// Whether transports that can broadcast move values so, in chunks, among the sender and all receivers.
  bool isCollective() const {
    const auto found = options.find("collective");
    return found != options.end() && found->second != 0;
  }
  /// The one canonical spelling: defaults are left out; parseStrategy(str()) is the same value.
  std::string str() const;
  bool operator==(const Strategy&) const = default;
};

/// Throws InvalidArgument saying which strategies, words and options exist.
Strategy parseStrategy(std::string_view text);

}  // namespace xmesh::core
