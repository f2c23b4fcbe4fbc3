--[[
Which queue knows an id. Ids are unique in the store, so every new one is looked for in all queues.
]]

local listed, bases

-- How the keys begin of every queue that was ever heard of, and of this one. On a cluster other queues are on other nodes, and ids
-- are unique per queue only.
function store.all_bases(q)
  if request.cluster then return {q and q.base} end
  if not bases then
    listed, bases = {}, {}
    for i, name in ipairs(request.others or call('SMEMBERS', STORE .. 'queues')) do listed[name], bases[i] = true, '{' .. name .. '}:' end
  end
  if q and not listed[q.name] then listed[q.name], bases[#bases + 1] = true, q.base end
  return bases
end

local function exist(keys)
  spent = spent + #keys
  for i = 1, #keys, PART do
    if call('EXISTS', unpack(keys, i, math.min(i + PART - 1, #keys))) > 0 then return true end
  end
  return false
end

-- Of these queues the one that knows the id or has staged tasks.
local function ask(names, from, to, id)
  local job, ended, keys = 'job:' .. id, 'o:end:' .. id, {}
  for i = from, to do
    local n = #keys
    keys[n + 1], keys[n + 2], keys[n + 3] = names[i] .. job, names[i] .. ended, names[i] .. 'o:staged'
  end
  return exist(keys)
end

-- The task of this id, in this queue or in the one that it moved to, or anywhere if the store has only one node.
function store.find(q, id)
  local t = cache[slot(q, id)]
  if t == nil and (call('EXISTS', job_key(q, id), end_key(q, id)) > 0 or store.staging(q)) then t = store.load(q, id) end
  if t and not t.gone then return t end
  if request.cluster then return nil end
  local there = whereabouts[id]
  if there == false then return nil end
  if type(there) == 'string' then there = store.load(queue(there), id) end
  if there and not there.gone then return there end
  local names = store.all_bases(q)
  for first = 1, #names, 1000 do
    local last = math.min(first + 999, #names)
    if ask(names, first, last, id) then
      for i = first, last do
        t = ask(names, i, i, id) and store.load(queue(string.sub(names[i], 2, -3)), id)
        if t then return t end
      end
    end
  end
  return nil
end
