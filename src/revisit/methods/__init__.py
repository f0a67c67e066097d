"""The decoding methods, one file each: the table of their names, and functions that find them."""

from __future__ import annotations

from revisit.decoding.method import METHODS, as_method
from revisit.decoding.method_id import MethodId, method_text, value_text

# A new method is one line here.
BUILT_IN = {
    "avisc": "revisit.methods.avisc:AvisC",
    "chain": "revisit.methods.chain:Chain",
    "code": "revisit.methods.code:CODE",
    "deco": "revisit.methods.deco:DeCo",
    "dola": "revisit.methods.dola:DoLa",
    "flb": "revisit.methods.flb:FLB",
    "greedy": "revisit.methods.greedy:Greedy",
    "icd": "revisit.methods.icd:ICD",
    "m3id": "revisit.methods.m3id:M3ID",
    "memvr": "revisit.methods.memvr:MemVR",
    "middle_layers": "revisit.methods.middle_layers:MiddleLayers",
    "only": "revisit.methods.only:ONLY",
    "opera": "revisit.methods.opera:OPERA",
    "pai": "revisit.methods.pai:PAI",
    "plausible_only": "revisit.methods.plausible_only:PlausibleOnly",
    "revisit": "revisit.methods.revisit:ReVisiT",
    "ritual": "revisit.methods.ritual:RITUAL",
    "sadt": "revisit.methods.sadt:SADT",
    "sid": "revisit.methods.sid:SID",
    "tcd": "revisit.methods.tcd:TCD",
    "vaf": "revisit.methods.vaf:VAF",
    "vcd": "revisit.methods.vcd:VCD",
    "vista": "revisit.methods.vista:VISTA",
}

find = METHODS.find
get = METHODS.get
names = METHODS.names
parse_method = METHODS.parse
parse_methods = METHODS.parse_list
register = METHODS.register

__all__ = [
    "MethodId",
    "as_method",
    "find",
    "get",
    "method_text",
    "names",
    "parse_method",
    "parse_methods",
    "register",
    "value_text",
]
