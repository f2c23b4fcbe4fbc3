--[[
Many ids at once on a store of many queues: the books of the queues are asked, instead of a key per id and queue.
]]

-- Finds out in the books of all queues where each of many ids is. What others publish is there once `sweep` has met it.
function store.look(ids)
  store.flush()
  local wanted = {}
  for _, id in ipairs(ids) do wanted[id] = false end
  for _, base in ipairs(store.all_bases()) do
    local books, found = base .. 'o:tasks', {}
    local size = call('ZCARD', books)
    if size > 0 and size <= 2 * #ids then
      found = call('ZRANGE', books, 0, -1)
    elseif size > 0 then
      for i = 1, #ids, PART do
        local last = math.min(i + PART - 1, #ids)
        local scores = call('ZMSCORE', books, unpack(ids, i, last))
        for n = i, last do
          if scores[n - i + 1] then found[#found + 1] = ids[n] end
        end
      end
    end
    for _, id in ipairs(found) do
      if wanted[id] == false then wanted[id] = string.sub(base, 2, -3) end
    end
    spent = spent + 1 + math.min(size, #ids) / 10
  end
  for id, place in pairs(wanted) do
    if type(whereabouts[id]) ~= 'table' then whereabouts[id] = place end
  end
end

-- What the tasks of this call will ask one by one: whether their ids, and those that they wait for, are known.
function store.foresee()
  local ids = {}
  for _, ops in ipairs(request.transactions) do
    for _, op in ipairs(ops) do
      if op.kind == 'enqueue' then
        ids[#ids + 1] = op.id
        for _, blocker in ipairs(op.blocked_by or {}) do ids[#ids + 1] = blocker[1] end
      elseif op.kind == 'enqueues' then
        for i = 1, #op.rows, 3 do ids[#ids + 1] = op.rows[i] end
      elseif op.kind == 'restore' then
        for _, saved in ipairs(op.tasks) do ids[#ids + 1] = saved.id end
      end
    end
  end
  store.look(ids)
end
