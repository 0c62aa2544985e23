#include "runtime/link/messages.h"

#include <stdexcept>
#include <utility>

#include "runtime/agreement/wire.h"

namespace xmesh::runtime::link {

bool isLinkMessage(std::string_view bytes) {
  return !bytes.empty() && static_cast<uint8_t>(bytes.front()) >= static_cast<uint8_t>(Kind::kEnter) &&
         static_cast<uint8_t>(bytes.front()) <= static_cast<uint8_t>(Kind::kBroken);
}

std::string encode(const Message& message) {
  WireWriter writer;
  writer.put(message.kind)
      .put(message.attempt.source)
      .put(message.attempt.version)
      .put(message.attempt.number)
      .put(message.count)
      .put(message.rank)
      .put(message.size);
  writer.put(static_cast<uint8_t>(message.has_all)).put(std::string_view(message.text)).put(static_cast<uint64_t>(message.numbers.size()));
  for (const uint64_t number : message.numbers) {
    writer.put(number);
  }
  writer.put(static_cast<uint64_t>(message.texts.size()));
  for (const std::string& text : message.texts) {
    writer.put(std::string_view(text));
  }
  const Party& party = message.party;
  writer.put(party.number).put(static_cast<uint8_t>(party.is_source)).put(std::string_view(party.replica));
  writer.put(static_cast<uint64_t>(party.members.size()));
  for (const Member& member : party.members) {
    writer.put(member.number).put(std::string_view(member.address)).put(std::string_view(member.host)).put(std::string_view(member.manifest));
  }
  return writer.take();
}

Message decode(std::string_view bytes) {
  if (!isLinkMessage(bytes)) {
    throw std::runtime_error("a message of a link is of no known kind");
  }
  WireReader reader(bytes);
  Message out;
  out.kind = reader.get<Kind>();
  out.attempt.source = reader.get<uint64_t>();
  out.attempt.version = reader.get<uint64_t>();
  out.attempt.number = reader.get<uint32_t>();
  out.count = reader.get<uint64_t>();
  out.rank = reader.get<int32_t>();
  out.size = reader.get<int32_t>();
  out.has_all = reader.get<uint8_t>() != 0;
  out.text = reader.getText();
  for (uint64_t left = reader.get<uint64_t>(); left > 0; --left) {
    out.numbers.push_back(reader.get<uint64_t>());
  }
  for (uint64_t left = reader.get<uint64_t>(); left > 0; --left) {
    out.texts.push_back(reader.getText());
  }
  out.party.number = reader.get<uint64_t>();
  out.party.is_source = reader.get<uint8_t>() != 0;
  out.party.replica = reader.getText();
  for (uint64_t left = reader.get<uint64_t>(); left > 0; --left) {
    Member member;
    member.number = reader.get<int32_t>();
    member.address = reader.getText();
    member.host = reader.getText();
    member.manifest = reader.getText();
    out.party.members.push_back(std::move(member));
  }
  return out;
}

}  // namespace xmesh::runtime::link
