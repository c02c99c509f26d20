#include <cstring>
#include <memory>

#include "c_api.h"
#include "files.h"
#include "state.h"

using namespace relax_grad;

namespace {

// It is not destroyed: other threads may call while the program ends.
Handles<relax_grad_file>& FilesOpen() {
  static auto* files = new Handles<relax_grad_file>();
  return *files;
}

const NamedTensors& Group(relax_grad_trainer& trainer, const char* name) {
  auto group = trainer.groups.find(Pointer(name, "group"));
  if (group != trainer.groups.end()) return group->second;
  Tensors tensors = trainer.trainer.group(name);
  return trainer.groups[name] = NamedTensors(tensors.begin(), tensors.end());
}

}  // namespace

int32_t relax_grad_num_group_tensors(relax_grad_trainer* trainer, const char* group,
                                     int64_t* number) {
  return Run([&] {
    *Pointer(number, "number") = Number(Group(Trainers().Get(trainer, "trainer"), group).size());
  });
}

int32_t relax_grad_group_tensor(relax_grad_trainer* trainer, const char* group, int64_t index,
                                relax_grad_tensor* tensor) {
  return Run([&] {
    const NamedTensors& tensors = Group(Trainers().Get(trainer, "trainer"), group);
    const auto& [name, own] = tensors[Place(index, tensors.size(), "tensor of the group")];
    *Pointer(tensor, "tensor") = View(name, own);
  });
}

int32_t relax_grad_get_counters(relax_grad_trainer* trainer, relax_grad_counters* counters) {
  return Run([&] {
    const Counters& own = Trainers().Get(trainer, "trainer").trainer.counters();
    *Pointer(counters, "counters") = {own.seed,    own.steps, own.updates,
                                      own.skipped, own.epoch, own.batch};
  });
}

int32_t relax_grad_set_counters(relax_grad_trainer* trainer, const relax_grad_counters* counters) {
  return Run([&] {
    relax_grad_trainer& own = Trainers().Get(trainer, "trainer");
    Pointer(counters, "counters");
    Counters changed{counters->seed,    counters->steps, counters->updates,
                     counters->skipped, counters->epoch, counters->batch};
    CheckCounters(changed, "counters");
    own.trainer.counters() = changed;
  });
}

int32_t relax_grad_save(relax_grad_trainer* trainer, const char* path) {
  return Run([&] { Trainers().Get(trainer, "trainer").trainer.Save(Pointer(path, "path")); });
}

int32_t relax_grad_load(relax_grad_trainer* trainer, const char* path) {
  return Run([&] {
    relax_grad_trainer& own = Trainers().Get(trainer, "trainer");
    own.trainer.Load(Pointer(path, "path"));
    own.groups.clear();
    own.outputs.clear();
    own.step_outputs.clear();
    own.metrics.clear();
    own.properties.clear();
  });
}

int32_t relax_grad_save_model(relax_grad_trainer* trainer, const char* path) {
  return Run([&] { Trainers().Get(trainer, "trainer").trainer.SaveModel(Pointer(path, "path")); });
}

int32_t relax_grad_load_model(relax_grad_trainer* trainer, const char* path) {
  return Run([&] {
    relax_grad_trainer& own = Trainers().Get(trainer, "trainer");
    own.trainer.LoadModel(Pointer(path, "path"));
    own.groups.clear();
  });
}

int32_t relax_grad_group_bytes(relax_grad_trainer* trainer, const char* group, uint64_t* size) {
  return Run([&] {
    const Trainer& own = Trainers().Get(trainer, "trainer").trainer;
    *Pointer(size, "size") = own.GroupBytes(Pointer(group, "group"));
  });
}

int32_t relax_grad_copy_group(relax_grad_trainer* trainer, const char* group, void* data,
                              uint64_t size) {
  return Run([&] {
    const Trainer& own = Trainers().Get(trainer, "trainer").trainer;
    if (size) Pointer(data, "data");
    own.CopyGroup(Pointer(group, "group"), data, static_cast<size_t>(size));
  });
}

int32_t relax_grad_set_group(relax_grad_trainer* trainer, const char* group, const void* data,
                             uint64_t size) {
  return Run([&] {
    relax_grad_trainer& own = Trainers().Get(trainer, "trainer");
    if (size) Pointer(data, "data");
    own.trainer.SetGroup(Pointer(group, "group"), data, static_cast<size_t>(size));
    own.groups.clear();
  });
}

int32_t relax_grad_num_properties(relax_grad_trainer* trainer, int64_t* number) {
  return Run([&] {
    relax_grad_trainer& own = Trainers().Get(trainer, "trainer");
    Pointer(number, "number");
    own.properties = own.trainer.properties();
    *number = Number(own.properties.size());
  });
}

int32_t relax_grad_property(relax_grad_trainer* trainer, int64_t index, const char** name,
                            const char** value) {
  return Run([&] {
    const auto& properties = Trainers().Get(trainer, "trainer").properties;
    const auto& [own_name, own_value] = properties[Place(index, properties.size(), "property")];
    Pointer(value, "value");
    *Pointer(name, "name") = own_name.c_str();
    *value = own_value.c_str();
  });
}

int32_t relax_grad_set_property(relax_grad_trainer* trainer, const char* name, const char* value) {
  return Run([&] {
    relax_grad_trainer& own = Trainers().Get(trainer, "trainer");
    std::optional<std::string> text;
    if (value) text = value;
    own.trainer.SetProperty(Pointer(name, "name"), text);
    own.properties.clear();
  });
}

int32_t relax_grad_read_file(const char* path, relax_grad_file** file) {
  return Run([&] {
    *Pointer(file, "file") = nullptr;
    Tensors tensors = LoadTensors(Pointer(path, "path"));
    auto read = std::make_unique<relax_grad_file>();
    read->tensors.assign(tensors.begin(), tensors.end());
    FilesOpen().Add(read.get());
    *file = read.release();
  });
}

int32_t relax_grad_close_file(relax_grad_file* file) {
  return Run([&] {
    if (file == nullptr) return;
    FilesOpen().Remove(file, "file");
    delete file;
  });
}

int32_t relax_grad_num_file_tensors(relax_grad_file* file, int64_t* number) {
  return Run(
      [&] { *Pointer(number, "number") = Number(FilesOpen().Get(file, "file").tensors.size()); });
}

int32_t relax_grad_file_tensor(relax_grad_file* file, int64_t index, relax_grad_tensor* tensor) {
  return Run([&] {
    const NamedTensors& tensors = FilesOpen().Get(file, "file").tensors;
    const auto& [name, own] = tensors[Place(index, tensors.size(), "tensor of the file")];
    *Pointer(tensor, "tensor") = View(name, own);
  });
}

int32_t relax_grad_write_file(const char* path, const relax_grad_tensor* tensors, int64_t number) {
  return Run([&] {
    Pointer(path, "path");
    SaveTensors(path, CopyAll(tensors, number, "tensors"));
  });
}
