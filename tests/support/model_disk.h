/* SPDX-License-Identifier: MIT */
/*
 * model_disk.h: a file system in memory that knows what has been synced, for io.h.
 *
 *   test::ModelDisk disk;
 *   mfsdp_io io = disk.io();
 *   disk.die_at(17);                         // the 17th call from now on and all later ones fail
 *   ... a save, which fails ...
 *   disk.crash(test::Crash::kLoseUnsynced, seed);   // what a new process finds
 *
 * Folders hold names, which are durable once the folder is synced; files hold bytes, durable once
 * the file is. A crash keeps everything (kill -9), only what is durable (loss of power), or of each
 * change that is not durable what a coin says: changes of one folder may come in any order and
 * writes may be missing in the middle.
 */
#ifndef MFSDP_TESTS_SUPPORT_MODEL_DISK_H
#define MFSDP_TESTS_SUPPORT_MODEL_DISK_H

#include "mfsdp/io.h"

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace test {

enum class Crash { kKeepAll, kLoseUnsynced, kAnyOfUnsynced };

/* What answers OK and does nothing. With kRename a folder that is not there is listed as empty and
 * can be removed, as in stores that have no folders. */
enum class Idle { kNothing, kRemove, kRemoveFolder, kRename };

class ModelDisk {
public:
  ModelDisk() : root_(std::make_shared<Node>()) { root_->is_folder = true; }

  mfsdp_io io() {
    static const mfsdp_io_ops ops = {sizeof(mfsdp_io_ops),
                                     "model",
                                     open,
                                     close,
                                     size,
                                     read_at,
                                     write_at,
                                     sync_file,
                                     sync_folder,
                                     make_folder,
                                     rename_name,
                                     remove_name,
                                     list,
                                     lock};
    mfsdp_io io;
    std::memset(&io, 0, sizeof(io));
    io.struct_nbytes = sizeof(io);
    io.ops = &ops;
    io.self = this;
    return io;
  }

  /* The n-th call from now on (from 1) fails; with die_at also all later ones. 0: none. */
  void fail_at(int64_t n) { arm(n, false); }
  void die_at(int64_t n) { arm(n, true); }
  int64_t calls() const { return calls_; } /* since the last arming */
  void set_short(bool on) { short_ = on; } /* every transfer is cut short or interrupted */
  void set_idle(Idle idle) { idle_ = idle; }
  void interrupt(int64_t count) { /* the next `count` transfers are; any thread */
    std::lock_guard<std::mutex> lock(mutex_);
    interrupts_ = count;
  }

  /* A new process, or a new power-on: no locks, no open files, and everything left is durable. */
  void crash(Crash kind, uint64_t seed) {
    seed_ = seed * UINT64_C(0x9e3779b97f4a7c15) + 1;
    settle(root_.get(), kind);
    arm(0, false);
    lock_held_ = false;
  }

  /* path -> bytes of all files. */
  std::map<std::string, std::string> files() const {
    std::map<std::string, std::string> out;
    collect(*root_, "", &out);
    return out;
  }
  std::string *bytes(const std::string &path) {
    Node *node = find(path).get();
    return node == nullptr ? nullptr : &node->data;
  }

private:
  struct Node;
  using Names = std::map<std::string, std::shared_ptr<Node>>;
  struct Change { /* of a folder: `gone` disappears, `name` becomes node */
    std::string gone, name;
    std::shared_ptr<Node> node;
  };
  struct Write {
    std::size_t at;
    std::string data;
  };
  struct Node {
    bool is_folder = false;
    Names names, durable_names;
    std::vector<Change> changes;
    std::string data, durable;
    std::vector<Write> writes;
  };

  void arm(int64_t n, bool dies) {
    calls_ = 0;
    fail_at_ = n;
    dies_ = dies;
  }
  bool coin() {
    seed_ ^= seed_ << 13;
    seed_ ^= seed_ >> 7;
    seed_ ^= seed_ << 17;
    return (seed_ >> 32 & 1u) != 0;
  }
  void settle(Node *node, Crash kind) {
    if (kind != Crash::kKeepAll) {
      Names names = node->durable_names;
      std::string data = node->durable;
      for (const Change &change : node->changes)
        if (kind == Crash::kAnyOfUnsynced && coin()) apply(change, &names);
      for (const Write &write : node->writes)
        if (kind == Crash::kAnyOfUnsynced && coin()) apply(write, &data);
      node->names = names;
      node->data = data;
    }
    node->durable_names = node->names;
    node->durable = node->data;
    node->changes.clear();
    node->writes.clear();
    for (const auto &entry : node->names)
      settle(entry.second.get(), kind);
  }
  static void apply(const Change &change, Names *names) {
    if (!change.gone.empty()) names->erase(change.gone);
    if (!change.name.empty()) (*names)[change.name] = change.node;
  }
  static void apply(const Write &write, std::string *data) {
    if (data->size() < write.at + write.data.size()) data->resize(write.at + write.data.size());
    data->replace(write.at, write.data.size(), write.data);
  }
  static void collect(const Node &node, const std::string &path,
                      std::map<std::string, std::string> *out) {
    for (const auto &entry : node.names) {
      if (entry.second->is_folder)
        collect(*entry.second, path + entry.first + "/", out);
      else
        (*out)[path + entry.first] = entry.second->data;
    }
  }

  std::shared_ptr<Node> find(const std::string &path) const {
    std::shared_ptr<Node> node = root_;
    std::size_t at = 0;
    while (node != nullptr && at < path.size()) {
      const std::size_t end = std::min(path.find('/', at), path.size());
      const std::string part = path.substr(at, end - at);
      at = end + 1;
      if (part.empty() || part == ".") continue;
      const auto it = node->names.find(part);
      node = it == node->names.end() ? nullptr : it->second;
    }
    return node;
  }
  std::shared_ptr<Node> parent(const std::string &path, std::string *name) const {
    const std::size_t slash = path.rfind('/');
    *name = slash == std::string::npos ? path : path.substr(slash + 1);
    return slash == std::string::npos ? root_ : find(path.substr(0, slash));
  }
  static void change(Node *folder, const Change &change) {
    apply(change, &folder->names);
    folder->changes.push_back(change);
  }

  /* One call: takes the lock, and fails if it is its turn. */
  struct Call {
    explicit Call(void *self)
        : disk(static_cast<ModelDisk *>(self)), guard(disk->mutex_),
          fails(++disk->calls_ == disk->fail_at_ ||
                (disk->dies_ && disk->fail_at_ > 0 && disk->calls_ > disk->fail_at_)) {}
    mfsdp_status error(mfsdp_error *out) const {
      return MFSDP_ERROR_SET(out, MFSDP_E_IO, -1, fails ? "planned" : "no such file or folder");
    }
    ModelDisk *disk;
    std::lock_guard<std::mutex> guard;
    bool fails;
  };

  static Node *node_of(mfsdp_io_file *file) { return reinterpret_cast<Node *>(file); }

  static mfsdp_status open(void *self, const char *path, mfsdp_io_mode mode, mfsdp_io_file **out,
                           mfsdp_error *error) {
    Call call(self);
    std::string name;
    if (call.fails) return call.error(error);
    std::shared_ptr<Node> node = call.disk->find(path);
    if (node == nullptr && mode == MFSDP_IO_CREATE) {
      const std::shared_ptr<Node> folder = call.disk->parent(path, &name);
      if (folder == nullptr) return call.error(error);
      node = std::make_shared<Node>();
      change(folder.get(), {"", name, node});
    }
    if (node == nullptr || node->is_folder) return call.error(error);
    if (mode == MFSDP_IO_CREATE) node->data.clear();
    call.disk->opened_.push_back(node); /* lives as long as the disk */
    *out = reinterpret_cast<mfsdp_io_file *>(node.get());
    return MFSDP_OK;
  }
  static mfsdp_status close(void *self, mfsdp_io_file *file, mfsdp_error *error) {
    Call call(self);
    if (file == reinterpret_cast<mfsdp_io_file *>(&call.disk->lock_held_))
      call.disk->lock_held_ = false;
    return call.fails ? call.error(error) : MFSDP_OK;
  }
  static mfsdp_status size(void *self, mfsdp_io_file *file, int64_t *nbytes, mfsdp_error *error) {
    Call call(self);
    if (call.fails) return call.error(error);
    *nbytes = static_cast<int64_t>(node_of(file)->data.size());
    return MFSDP_OK;
  }
  /* How much of nbytes moves; -1: interrupted. */
  static int64_t part(Call *call, std::size_t nbytes) {
    if (call->disk->interrupts_ > 0 && call->disk->interrupts_-- > 0) return -1;
    if (!call->disk->short_) return static_cast<int64_t>(nbytes);
    if (call->disk->calls_ % 3 == 0) return -1;
    return static_cast<int64_t>(nbytes > 7 ? nbytes / 2 : 1);
  }
  static mfsdp_status read_at(void *self, mfsdp_io_file *file, int64_t offset, std::size_t nbytes,
                              void *dst, int64_t *done, mfsdp_error *error) {
    Call call(self);
    const std::string &data = node_of(file)->data;
    const std::size_t at = std::min(static_cast<std::size_t>(offset), data.size());
    if (call.fails) return call.error(error);
    *done = part(&call, std::min(nbytes, data.size() - at));
    if (at == data.size()) *done = 0;
    if (*done > 0) std::memcpy(dst, data.data() + at, static_cast<std::size_t>(*done));
    return MFSDP_OK;
  }
  static mfsdp_status write_at(void *self, mfsdp_io_file *file, int64_t offset, std::size_t nbytes,
                               const void *src, int64_t *done, mfsdp_error *error) {
    Call call(self);
    if (call.fails) return call.error(error);
    *done = part(&call, nbytes);
    if (*done <= 0) return MFSDP_OK;
    const Write write = {
        static_cast<std::size_t>(offset),
        std::string(static_cast<const char *>(src), static_cast<std::size_t>(*done))};
    apply(write, &node_of(file)->data);
    node_of(file)->writes.push_back(write);
    return MFSDP_OK;
  }
  static mfsdp_status sync_file(void *self, mfsdp_io_file *file, mfsdp_error *error) {
    Call call(self);
    if (call.fails) return call.error(error);
    node_of(file)->durable = node_of(file)->data;
    node_of(file)->writes.clear();
    return MFSDP_OK;
  }
  static mfsdp_status sync_folder(void *self, const char *path, mfsdp_error *error) {
    Call call(self);
    const std::shared_ptr<Node> node = call.disk->find(path);
    if (call.fails || node == nullptr) return call.error(error);
    node->durable_names = node->names;
    node->changes.clear();
    return MFSDP_OK;
  }
  static mfsdp_status make_folder(void *self, const char *path, int32_t *existed,
                                  mfsdp_error *error) {
    Call call(self);
    std::string name;
    if (call.fails) return call.error(error);
    if (call.disk->find(path) != nullptr) {
      *existed = 1;
      return MFSDP_OK;
    }
    const std::shared_ptr<Node> folder = call.disk->parent(path, &name);
    if (folder == nullptr) return call.error(error);
    const std::shared_ptr<Node> node = std::make_shared<Node>();
    node->is_folder = true;
    change(folder.get(), {"", name, node});
    return MFSDP_OK;
  }
  static mfsdp_status rename_name(void *self, const char *from, const char *to,
                                  mfsdp_error *error) {
    Call call(self);
    std::string from_name, to_name;
    const std::shared_ptr<Node> node = call.disk->find(from), there = call.disk->find(to);
    const std::shared_ptr<Node> folder = call.disk->parent(from, &from_name);
    if (call.fails || node == nullptr) return call.error(error);
    if (call.disk->idle_ == Idle::kRename) return MFSDP_OK;
    if (call.disk->parent(to, &to_name) != folder)
      return MFSDP_ERROR_SET(error, MFSDP_E_IO, -1, "the model renames inside one folder only");
    if (there != nullptr && there->is_folder && !there->names.empty())
      return MFSDP_ERROR_SET(error, MFSDP_E_IO, -1, "it is there already and not empty");
    change(folder.get(), {from_name, to_name, node});
    return MFSDP_OK;
  }
  static mfsdp_status remove_name(void *self, const char *path, mfsdp_error *error) {
    Call call(self);
    std::string name;
    const std::shared_ptr<Node> node = call.disk->find(path);
    const Idle idle = call.disk->idle_;
    if (node == nullptr && idle == Idle::kRename && !call.fails) return MFSDP_OK;
    if (call.fails || node == nullptr) return call.error(error);
    if (idle == Idle::kRemove || (idle == Idle::kRemoveFolder && node->is_folder)) return MFSDP_OK;
    if (!node->names.empty())
      return MFSDP_ERROR_SET(error, MFSDP_E_IO, -1, "it is there already and not empty");
    const std::shared_ptr<Node> folder = call.disk->parent(path, &name);
    change(folder.get(), {name, "", nullptr});
    return MFSDP_OK;
  }
  static mfsdp_status list(void *self, const char *path, mfsdp_io_name visit, void *user,
                           mfsdp_error *error) {
    Call call(self);
    const std::shared_ptr<Node> node = call.disk->find(path);
    if (node == nullptr && call.disk->idle_ == Idle::kRename && !call.fails) return MFSDP_OK;
    if (call.fails || node == nullptr || !node->is_folder) return call.error(error);
    for (const auto &entry : node->names)
      visit(user, entry.first.c_str());
    return MFSDP_OK;
  }
  static mfsdp_status lock(void *self, const char *path, mfsdp_io_file **out, mfsdp_error *error) {
    Call call(self);
    (void)path;
    if (call.fails) return call.error(error);
    if (call.disk->lock_held_)
      return MFSDP_ERROR_SET(error, MFSDP_E_STATE, -1, "someone else has it");
    call.disk->lock_held_ = true;
    *out = reinterpret_cast<mfsdp_io_file *>(&call.disk->lock_held_);
    return MFSDP_OK;
  }

  std::mutex mutex_;
  std::shared_ptr<Node> root_;
  std::vector<std::shared_ptr<Node>> opened_;
  int64_t calls_ = 0, fail_at_ = 0, interrupts_ = 0;
  bool dies_ = false, short_ = false, lock_held_ = false;
  Idle idle_ = Idle::kNothing;
  uint64_t seed_ = 1;
};

} // namespace test

#endif // MFSDP_TESTS_SUPPORT_MODEL_DISK_H
