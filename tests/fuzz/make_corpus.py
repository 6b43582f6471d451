# SPDX-License-Identifier: MIT
"""Writes tests/fuzz/corpus: python3 tests/fuzz/make_corpus.py. Inputs as the fuzz programs take them."""
import os

here = os.path.join(os.path.dirname(os.path.abspath(__file__)), "corpus")


def tensor(name, dtype, shape, begin, end):
    return '"%s":{"dtype":"%s","shape":%s,"data_offsets":[%d,%d]}' % (name, dtype, shape, begin, end)


two = "{%s,%s}" % (tensor("b", "F32", "[2,3]", 0, 24), tensor("a", "BF16", "[]", 24, 26))
headers = {
    "empty": ("{}", 0),
    "padded": ("{}      ", 0),
    "two": (two, 26),
    "metadata": ('{"__metadata__":{"format":"pt","n":"line\\n"},' + two[1:], 26),
    "blanks": (' { "a" : { "shape" : [ 1 ,\t2 ] , "dtype" : "I64" , "data_offsets" : [ 0 , 16 ] } }\n'[1:], 16),
    "zero_size": ("{%s,%s}" % (tensor("z", "U8", "[0,7]", 0, 0), tensor("y", "I8", "[2]", 0, 2)), 2),
    "small_floats": ("{%s,%s}" % (tensor("p", "F4", "[2]", 0, 1), tensor("q", "F6_E3M2", "[4]", 1, 4)), 4),
    "escapes": ("{%s}" % tensor("\\u00e9\\ud83d\\ude00\\/\\\"\\\\", "C64", "[1]", 0, 8), 8),
    "utf8": ("{%s}" % tensor("\u00e9\u4e2d\U0001f600", "F8_E8M0", "[1]", 0, 1), 1),
    "twice": ("{%s,%s}" % (tensor("a", "U8", "[1]", 0, 1), tensor("a", "U8", "[1]", 1, 2)), 2),
    "overlap": ("{%s,%s}" % (tensor("a", "U16", "[1]", 0, 2), tensor("b", "U16", "[1]", 1, 3)), 3),
    "hole": ("{%s}" % tensor("a", "U8", "[1]", 1, 2), 2),
    "large": ("{%s}" % tensor("a", "F64", "[4294967296,4294967296]", 0, 8), 8),
    "number": ("{%s}" % tensor("a", "F64", "[9223372036854775808]", 0, 8), 8),
    "nested": ("{" + '"a":{"shape":' + "[" * 40, 0),
    "many": ("{%s}" % ",".join(tensor("n%d" % i, "BOOL", "[1,1,1]", i, i + 1) for i in range(20)), 20),
}
indexes = {
    "empty": '{"weight_map":{}}',
    "two": '{\n  "metadata": {\n    "total_size": 24\n  },\n  "weight_map": {\n    "a": "m-1.safetensors",\n    "b": "m-2.safetensors"\n  }\n}\n',
    "float": '{"metadata":{"total_size":24.0,"format":"pt"},"weight_map":{"a":"f"}}',
    "skipped": '{"x":[1,-2.5e-3,{"y":[],"z":{}},true,false,null,"s\\n"],"weight_map":{"a":"f"}}',
    "escapes": '{"weight_map":{"\\u00e9\\ud83d\\ude00":"o\\u006ee.st","b":"o\\u006ee.st"}}',
    "folder": '{"weight_map":{"a":"..\\/f"}}',
    "twice": '{"weight_map":{"a":"f","a":"g"}}',
    "deep": '{"x":' + "[" * 32 + "]" * 32 + ',"weight_map":{"a":"f"}}',
    "too_deep": '{"x":' + '{"y":' * 33,
    "cut": '{"metadata":{"total_size":1',
}


def write(folder, name, data):
    os.makedirs(os.path.join(here, folder), exist_ok=True)
    with open(os.path.join(here, folder, name), "wb") as f:
        f.write(data)


for name, (text, nbytes) in headers.items():
    text = text.encode()
    write("header", name, b"\x01" + nbytes.to_bytes(2, "little") + text)
    if name in ("two", "empty", "hole"):
        write("header", name + "_file", b"\x00" + len(text).to_bytes(8, "little") + text + bytes(nbytes))
write("header", "length_largest", b"\x00" + b"\xff" * 8 + b"{}")
write("header", "length_too_long", b"\x00" + (3).to_bytes(8, "little") + b"{}")
for name, text in indexes.items():
    write("index", name, text.encode())
