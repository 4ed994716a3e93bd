-- Put in front of scripts: unpack has its name of Lua 5.4, and keys that the call does not declare are refused.
local unpack, table = nil, setmetatable({unpack = unpack}, {__index = table})
local redis = (function(real)
  local none, second = {TIME = 1, PUBLISH = 1, INFO = 1}, {XINFO = 1, XGROUP = 1}
  local all = {DEL = 1, EXISTS = 1, UNLINK = 1}
  local function check(command, ...)
    local args, declared = {...}, {}
    for _, key in ipairs(KEYS) do declared[key] = true end
    if none[command] then return end
    local from, to = 1, 1
    if second[command] then from, to = 2, 2 end
    if all[command] then to = #args end
    if command == 'XREADGROUP' then
      for i, a in ipairs(args) do
        if a == 'STREAMS' then from, to = i + 1, i + 1 end
      end
    end
    for i = from, to do
      if not declared[args[i]] then
        error('ERR script tried accessing undeclared key ' .. tostring(args[i]) .. ' with ' .. command)
      end
    end
  end
  local function checked(call)
    return function(...)
      check(...)
      return call(...)
    end
  end
  return setmetatable({call = checked(real.call), pcall = checked(real.pcall)}, {__index = real})
end)(redis)
